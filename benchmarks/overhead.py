"""Does Shoal cost throughput? A plain JAX loop and Shoal by turns, on the same processes and devices.

    python -m benchmarks.overhead [--rounds 5] [--hosts 4] [--devices-per-host 2] [--steps 60] [--json FILE]

Each round measures four variants, each of which adds one thing to the one before, in an order that rotates from round
to round. Ratios are taken within a round. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from benchmarks.bare_loop import BareResult, BareSpec, StepKind
from benchmarks.common import (
    QUICKSTART,
    ROOT,
    BenchmarkError,
    ShoalRun,
    Summary,
    busy_with_others,
    describe_machine,
    parser,
    positive,
    print_results,
    quickstart,
    run_benchmark,
    say,
    table,
    write_json,
)
from trainer.config import RunConfig, load_config
from trainer.control.engines.local import LocalEngine, measured_device_memory
from trainer.control.run import settle_config
from trainer.description import JobDescription, describe_job
from trainer.planning.capacity import Capacity
from trainer.planning.topology import Refusal, TopologyPlan, plan_topology
from trainer.records import CheckpointCommitted, CheckpointSaving, Incident

Variant = Literal["bare", "step", "control", "checkpoints"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
TITLES: dict[Variant, str] = {
    "bare": "(a) bare loop",
    "step": "(b) bare loop with Shoal's step",
    "control": "(c) Shoal, no checkpoint",
    "checkpoints": "(d) Shoal with checkpoints",
}
CAUSES: tuple[tuple[str, Variant, Variant], ...] = (
    ("step program: digest, votes, metrics", "step", "bare"),
    ("control plane: agents, controller, Prefect", "control", "step"),
    ("checkpoints", "checkpoints", "control"),
    ("all of Shoal", "checkpoints", "bare"),
)
TARGET = 0.97
QUIET = 0.1
"""Share of the machine that others may use for the target to be judged."""
_RUN_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One variant in one round."""

    round: int
    variant: Variant
    step_seconds: tuple[float, ...]
    """Of the steps after the warm-up."""
    tokens_per_step: int
    loss: float
    """Of the last step trained."""
    busy_before: float
    """Share of the machine's cores that others used just before."""
    saves: int = 0
    """Begun within the measured steps."""
    blocking_seconds: float = 0.0
    """Time that these saves held process 0 up."""

    @property
    def steps_per_second(self) -> float:
        return len(self.step_seconds) / math.fsum(self.step_seconds)

    @property
    def mean_step_seconds(self) -> float:
        return math.fsum(self.step_seconds) / len(self.step_seconds)


# --- figures -------------------------------------------------------------------------------------------------------


def order_of_round(round_: int) -> list[Variant]:
    """Rotates, so that no variant always runs first or after the same other one's heat."""
    turn = round_ % len(VARIANTS)
    return [*VARIANTS[turn:], *VARIANTS[:turn]]


def scaled_save_interval(steps: int, config: RunConfig) -> int:
    """As many saves in `steps` as the configuration makes in its own number of steps."""
    return max(1, steps * config.checkpoint.save_interval_steps // config.steps)


def of_variant(measurements: Sequence[Measurement], variant: Variant) -> list[Measurement]:
    return sorted((one for one in measurements if one.variant == variant), key=lambda one: one.round)


def paired(
    measurements: Sequence[Measurement], variant: Variant, base: Variant
) -> list[tuple[Measurement, Measurement]]:
    """(variant, base) of each round that has both."""
    bases = {one.round: one for one in of_variant(measurements, base)}
    return [(one, bases[one.round]) for one in of_variant(measurements, variant) if one.round in bases]


def ratios(measurements: Sequence[Measurement], variant: Variant, base: Variant) -> list[float]:
    """Throughput of the variant over the base's, round by round."""
    return [one.steps_per_second / other.steps_per_second for one, other in paired(measurements, variant, base)]


def extra_seconds(measurements: Sequence[Measurement], variant: Variant, base: Variant) -> list[float]:
    """What one step takes longer in the variant than in the base, round by round."""
    return [one.mean_step_seconds - other.mean_step_seconds for one, other in paired(measurements, variant, base)]


def save_cost_seconds(measurements: Sequence[Measurement]) -> float | None:
    """What one checkpoint costs, its writing beside the training included; None without a save."""
    costs = [
        math.fsum(one.step_seconds) - other.mean_step_seconds * len(one.step_seconds)
        for one, other in paired(measurements, "checkpoints", "control")
    ]
    saves = [one.saves for one, _ in paired(measurements, "checkpoints", "control")]
    if not saves or min(saves) == 0:
        return None
    return statistics.median(cost / number for cost, number in zip(costs, saves, strict=True))


def ratio_at_interval(measurements: Sequence[Measurement], save_interval_steps: int) -> float | None:
    """d/a if a checkpoint were saved each `save_interval_steps`, from c/a and the cost of a save; None without one."""
    cost = save_cost_seconds(measurements)
    if cost is None:
        return None
    control = statistics.median(one.mean_step_seconds for one in of_variant(measurements, "control"))
    slowed = 1 + cost / (save_interval_steps * control)
    return statistics.median(ratios(measurements, "control", "bare")) / slowed


def throughput_table(measurements: Sequence[Measurement]) -> Table:
    rows = []
    for variant in VARIANTS:
        ones = of_variant(measurements, variant)
        speed = Summary.of([one.steps_per_second for one in ones])
        tokens = statistics.median(one.steps_per_second * one.tokens_per_step for one in ones)
        median_step = statistics.median(statistics.median(one.step_seconds) for one in ones)
        to_bare = Summary.of(ratios(measurements, variant, "bare"))
        rows.append(
            (
                TITLES[variant],
                f"{speed.median:.2f}",
                f"{speed.least:.2f} … {speed.most:.2f}",
                f"{tokens:,.0f}",
                f"{1e3 * median_step:.1f}",
                f"{to_bare.median:.3f}",
                f"{to_bare.least:.3f} … {to_bare.most:.3f}",
            )
        )
    columns = ("variant", "steps/s", "min … max", "tokens/s", "median step ms", "of bare", "min … max")
    return table("Throughput after the warm-up (medians over rounds)", columns, rows)


def causes_table(measurements: Sequence[Measurement]) -> Table:
    bare = statistics.median(one.mean_step_seconds for one in of_variant(measurements, "bare"))
    rows = []
    for title, variant, base in CAUSES:
        ratio = Summary.of(ratios(measurements, variant, base))
        extra = statistics.median(extra_seconds(measurements, variant, base))
        rows.append(
            (
                f"{title} ({letter(variant)}/{letter(base)})",
                f"{ratio.median:.3f}",
                f"{ratio.least:.3f} … {ratio.most:.3f}",
                f"{1e3 * extra:+.2f}",
                f"{100 * extra / bare:+.1f}%",
            )
        )
    return table(
        "What each cause costs (pairs within a round)",
        ("cause", "ratio", "min … max", "ms per step", "of a bare step"),
        rows,
    )


def letter(variant: Variant) -> str:
    return "abcd"[VARIANTS.index(variant)]


def result_lines(measurements: Sequence[Measurement], save_interval_steps: int, usual_interval_steps: int) -> list[str]:
    whole = statistics.median(ratios(measurements, "checkpoints", "bare"))
    busy = Summary.of([one.busy_before for one in measurements])
    verdict = "met" if whole >= TARGET else "missed"
    if busy.most > QUIET:
        verdict = "not judged, the machine was in use"
    lines = [
        f"Shoal with checkpoints each {save_interval_steps} steps runs at {whole:.3f} of the bare loop "
        f"(target {TARGET}: {verdict})."
    ]
    cost = save_cost_seconds(measurements)
    usual = ratio_at_interval(measurements, usual_interval_steps)
    if cost is not None and usual is not None:
        saved = of_variant(measurements, "checkpoints")
        blocking = statistics.median(one.blocking_seconds / one.saves for one in saved)
        lines.append(
            f"A checkpoint costs {1e3 * cost:.0f} ms of training ({1e3 * blocking:.0f} ms of them held up, the rest "
            f"shared cores); reckoned with that, saving each {usual_interval_steps} steps gives {usual:.3f}."
        )
    lines.append(
        f"Others used {busy.median:.0%} of the machine before a variant started (median; most {busy.most:.0%})."
    )
    return lines


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One call of the command: what all its measurements share."""

    hosts: int
    devices_per_host: int
    steps: int
    """The last one measured; one more is trained, so that what ends a run lies outside."""
    warmup_steps: int
    save_interval_steps: int
    directory: Path
    description: JobDescription
    topology: TopologyPlan

    @classmethod
    def plan(cls, options: argparse.Namespace, directory: Path) -> Bench:
        config = bench_config(directory, "plan", options.hosts, options.devices_per_host, options.steps, 1)
        description = describe_job(config)
        capacity = Capacity.uniform(
            options.hosts, devices_per_host=options.devices_per_host, hosts_per_slice=config.engine.hosts_per_slice
        )
        topology = plan_topology(config, capacity, description.footprint, measured_device_memory(config))
        if isinstance(topology, Refusal):
            raise BenchmarkError(f"{topology.reason}; {topology.needed}")
        interval = options.save_interval_steps or scaled_save_interval(options.steps, load_config(QUICKSTART))
        return cls(
            hosts=options.hosts,
            devices_per_host=options.devices_per_host,
            steps=options.steps,
            warmup_steps=options.warmup_steps,
            save_interval_steps=interval,
            directory=directory,
            description=description,
            topology=topology,
        )

    def measure(self, round_: int, variant: Variant) -> Measurement:
        measuring: dict[Variant, Callable[[int], Measurement]] = {
            "bare": lambda round_: self._bare(round_, "bare", "plain"),
            "step": lambda round_: self._bare(round_, "step", "shoal"),
            "control": lambda round_: self._shoal(round_, "control", self.steps + 1),
            "checkpoints": lambda round_: self._shoal(round_, "checkpoints", self.save_interval_steps),
        }
        return measuring[variant](round_)

    def _config(self, name: str, save_interval_steps: int) -> RunConfig:
        return bench_config(self.directory, name, self.hosts, self.devices_per_host, self.steps, save_interval_steps)

    def _bare(self, round_: int, variant: Variant, step: StepKind) -> Measurement:
        name = f"{variant}-{round_}"
        config = settle_config(self._config(name, self.steps + 1), None)
        busy = busy_with_others()
        result = run_bare(config, self.topology, step, self.directory / name)
        return Measurement(
            round=round_,
            variant=variant,
            step_seconds=result.step_seconds[self.warmup_steps : self.steps],
            tokens_per_step=config.global_batch_size * self.description.tokens_per_row,
            loss=result.loss,
            busy_before=busy,
        )

    def _shoal(self, round_: int, variant: Variant, save_interval_steps: int) -> Measurement:
        config = self._config(f"{variant}-{round_}", save_interval_steps)
        busy = busy_with_others()
        with ShoalRun(config, self.directory) as run:
            history = run.wait_complete(_RUN_SECONDS)
            run.look()
        if any(isinstance(event, Incident) for event in run.events) or len(history.topologies) != 1:
            raise BenchmarkError(f"the run was disturbed:\n{run.output_tail()}")
        topology = history.topologies[0].topology
        if topology is None or not topology.same_program(self.topology):
            raise BenchmarkError("Shoal trained on another topology than the bare loop")
        measured = [one for one in history.metrics if self.warmup_steps < one.step <= self.steps]
        saving = [
            event
            for event in run.events
            if isinstance(event, CheckpointSaving) and self.warmup_steps < event.step <= self.steps
        ]
        committed = {event.step for event in run.events if isinstance(event, CheckpointCommitted)}
        if missing := [event.step for event in saving if event.step not in committed]:
            raise BenchmarkError(f"checkpoints of steps {missing} were not committed:\n{run.output_tail()}")
        shutil.rmtree(run.store.root)
        return Measurement(
            round=round_,
            variant=variant,
            step_seconds=tuple(one.step_seconds for one in measured),
            tokens_per_step=measured[-1].tokens,
            loss=history.metrics[-1].loss,
            busy_before=busy,
            saves=len(saving),
            blocking_seconds=math.fsum(event.blocking_seconds for event in saving),
        )


def bench_config(
    directory: Path, name: str, hosts: int, devices_per_host: int, steps: int, save_interval_steps: int
) -> RunConfig:
    return quickstart(
        directory, name, hosts, devices_per_host, steps=steps + 1, checkpoint__save_interval_steps=save_interval_steps
    )


def run_bare(config: RunConfig, topology: TopologyPlan, step: StepKind, directory: Path) -> BareResult:
    """The loop on as many processes as the topology has hosts, each in the environment that a worker would get."""
    directory.mkdir()
    engine = LocalEngine(
        config.engine,
        contact_timeout_seconds=config.elastic.contact_timeout_seconds,
        run="",
        controller="",
        pool_directory=directory,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    spec_path = directory / "spec.json"
    spec = BareSpec(config=config, topology=topology, step=step, coordinator_address=address)
    spec_path.write_text(spec.model_dump_json())
    processes: list[subprocess.Popen[bytes]] = []
    outputs = [directory / f"output-{index}.txt" for index in range(topology.num_processes)]
    results = [directory / f"result-{index}.json" for index in range(topology.num_processes)]
    try:
        for index, host_id in enumerate(topology.hosts):
            with outputs[index].open("wb") as output:
                arguments = [str(os.getpid()), str(spec_path), str(index), str(results[index])]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.bare_loop", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=ROOT,
                        env={**os.environ, **engine.worker_environment(host_id)},
                        start_new_session=True,
                    )
                )
        for index, process in enumerate(processes):
            try:
                code = process.wait(_RUN_SECONDS)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"the bare loop did not end within {_RUN_SECONDS:.0f} s") from None
            if code != 0:
                tail = "\n".join(outputs[index].read_text(errors="replace").splitlines()[-30:])
                raise BenchmarkError(f"process {index} of the bare loop ended with {code}:\n{tail}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return BareResult.model_validate_json(results[0].read_bytes())


def check_same_work(measurements: Sequence[Measurement]) -> None:
    """Shoal's step on the same topology is the same program: its loss must not differ by a bit."""
    losses = {one.loss for one in measurements if one.variant != "bare"}
    if len(losses) > 1:
        raise BenchmarkError(f"the variants did not train the same thing: losses {sorted(losses)}")


def main(arguments: Sequence[str] | None = None) -> int:
    options_parser = parser("Compare the throughput of Shoal with a plain JAX loop.")
    options_parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="times that each variant runs")
    options_parser.add_argument("--steps", type=positive, default=60, metavar="N", help="steps of a run")
    options_parser.add_argument("--warmup-steps", type=positive, default=10, metavar="N", help="of these, not measured")
    options_parser.add_argument(
        "--save-interval-steps",
        type=positive,
        metavar="N",
        help="steps between checkpoints of (d); without it, as many per run as the quickstart makes",
    )
    options = options_parser.parse_args(arguments)
    if options.warmup_steps >= options.steps:
        options_parser.error("--warmup-steps must be smaller than --steps")

    def work(directory: Path) -> None:
        machine = describe_machine()
        bench = Bench.plan(options, directory)
        say(f"{bench.hosts} processes, {bench.topology.mesh}, a checkpoint each {bench.save_interval_steps} steps")
        measurements: list[Measurement] = []
        for round_ in range(options.rounds):
            for variant in order_of_round(round_):
                one = bench.measure(round_, variant)
                measurements.append(one)
                say(
                    f"round {round_ + 1}/{options.rounds}  {TITLES[variant]}: {one.steps_per_second:.2f} steps/s "
                    f"(others used {one.busy_before:.0%} of the machine)"
                )
        check_same_work(measurements)
        usual = load_config(QUICKSTART).checkpoint.save_interval_steps
        lines = result_lines(measurements, bench.save_interval_steps, usual)
        print_results(machine, [throughput_table(measurements), causes_table(measurements)], lines)
        write_json(options.json, results_document(machine, options, bench, measurements, usual))

    return run_benchmark(work)


def results_document(
    machine: dict[str, Any],
    options: argparse.Namespace,
    bench: Bench,
    measurements: Sequence[Measurement],
    usual_interval_steps: int,
) -> dict[str, Any]:
    return {
        "machine": machine,
        "options": {
            "rounds": options.rounds,
            "hosts": bench.hosts,
            "devices_per_host": bench.devices_per_host,
            "steps": bench.steps,
            "warmup_steps": bench.warmup_steps,
            "save_interval_steps": bench.save_interval_steps,
        },
        "mesh": str(bench.topology.mesh),
        "steps_per_second": {
            variant: dataclasses.asdict(Summary.of([one.steps_per_second for one in of_variant(measurements, variant)]))
            for variant in VARIANTS
        },
        "ratios": {
            f"{letter(variant)}/{letter(base)}": dataclasses.asdict(Summary.of(ratios(measurements, variant, base)))
            for _, variant, base in CAUSES
        },
        "save_cost_seconds": save_cost_seconds(measurements),
        "ratio_at_interval": {usual_interval_steps: ratio_at_interval(measurements, usual_interval_steps)},
        "measurements": [dataclasses.asdict(one) for one in measurements],
    }


if __name__ == "__main__":
    sys.exit(main())
