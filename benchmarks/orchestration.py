"""What does Prefect cost a run, and how soon does a run grow when there are more hosts?

    python -m benchmarks.orchestration [--parts segments,growth] [--servers embedded,sqlite,postgres] [--pairs 5]
                                       [--segments 20] [--growths 5] [--json FILE]

Trains a job of no weight, so that what is around the segments shows. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import yaml
from pydantic import TypeAdapter
from rich.table import Table

from benchmarks.common import (
    ROOT,
    BenchmarkError,
    Summary,
    busy_with_others,
    describe_machine,
    positive,
    print_results,
    run_benchmark,
    say,
    table,
    write_json,
)
from benchmarks.segment_loop import LEFT_OUT, Block, Order, Side
from benchmarks.servers import KINDS, TABLES, TITLES, Contents, Server, end, find_postgres, free_port, serving
from benchmarks.tiny_job import ROW_SECONDS_VARIABLE
from deployments.capacity_events import CAPACITY_CHANGED, GROWTH_LABEL
from deployments.serve import service_id
from deployments.serve_config import ServeConfig
from trainer import wire
from trainer.config import RunConfig, parse_config
from trainer.control.remote import RemoteController, RemotePool
from trainer.errors import RefusedError
from trainer.history import RunHistory
from trainer.processes import tethered
from trainer.records import Recovered
from trainer.store import LocalStore, run_store

T = TypeVar("T")

PARTS = ("segments", "growth")
JOB = "benchmarks.tiny_job:Linear"
LONG_SEGMENT_SECONDS = 30.0
"""Of the segments that the targets speak of."""
SHARE_TARGET = 0.01
GROWTH_TARGET_SECONDS = 5.0
# Never reached.
_STEPS = 1_000_000
_STEPS_PER_SEGMENT = 5
_ROW_SECONDS = 0.01
_FLOW_SECONDS = 1200.0
_PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.05
_STOP_SECONDS = 60.0
_FOLLOW_SECONDS = 1.0


# --- segments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """One run against one server."""

    server: str
    steps_per_segment: int
    blocks: list[Block]
    prefect_segments: int
    """Whose task runs Prefect heard of; those of the blocks and the first one."""
    gained: Contents
    """What the whole run put into Prefect's database, whatever does not depend on segments included."""

    def of(self, side: Side) -> list[Block]:
        return [block for block in self.blocks if block.side == side]

    def milliseconds(self, side: Side, what: Callable[[Block], float]) -> list[float]:
        """A value in seconds of each block, per segment of it, in the order of the pairs."""
        return [1000 * what(block) for block in self.of(side)]

    def added(self, what: Callable[[Block], float]) -> list[float]:
        """Milliseconds that Prefect adds to a segment, pair by pair."""
        with_it, without = self.milliseconds("prefect", what), self.milliseconds("bare", what)
        return [a - b for a, b in zip(with_it, without, strict=True)]

    @property
    def steps(self) -> int:
        """Of all its segments."""
        return self.steps_per_segment * (1 + sum(block.segments for block in self.blocks))

    def per_thousand(self, count: float) -> float:
        return 1000 * count / self.prefect_segments


def gap(block: Block) -> float:
    """Seconds of the flow's thread between two segments."""
    return statistics.median(block.gap_seconds)


def length(block: Block) -> float:
    """Seconds of training per segment. The mean: a wait that comes now and then counts."""
    return statistics.mean(block.segment_seconds)


def flow_cpu(block: Block) -> float:
    return block.flow_cpu_seconds / block.segments


def server_cpu(block: Block) -> float:
    return block.server_cpu_seconds / block.segments


def costs_table(costs: Sequence[SegmentCosts]) -> Table:
    rows = []
    for one in costs:
        for title, what in (
            ("flow's thread between segments", gap),
            ("training, from segment to segment", length),
            ("CPU of the flow process", flow_cpu),
            ("CPU of server and database", server_cpu),
        ):
            added = Summary.of(one.added(what))
            rows.append(
                (
                    f"{TITLES[one.server]}: {title}",
                    *(f"{statistics.median(one.milliseconds(side, what)):.2f}" for side in ("bare", "prefect")),
                    f"{added.median:+.2f}",
                    f"{added.least:+.2f} … {added.most:+.2f}",
                )
            )
    return table("What Prefect adds to a segment", ("ms per segment", "without", "with", "added", "min … max"), rows)


def database_table(costs: Sequence[SegmentCosts]) -> Table:
    columns = ("per 1,000 segments", "steps each", "MB", *TABLES, "log KB")
    rows = [
        (
            TITLES[one.server],
            str(one.steps_per_segment),
            f"{one.per_thousand(one.gained.size) / 1e6:.1f}",
            *(f"{one.per_thousand(one.gained.rows[name]):,.0f}" for name in TABLES),
            f"{one.per_thousand(one.gained.log_bytes) / 1000:.1f}",
        )
        for one in costs
    ]
    return table("What a run leaves in Prefect's database", columns, rows)


def segment_lines(costs: Sequence[SegmentCosts]) -> list[str]:
    lines = []
    for one in costs:
        added = statistics.median(one.added(gap))
        share = added / 1000 / LONG_SEGMENT_SECONDS
        lines.append(
            f"{TITLES[one.server]}: {added:.1f} ms of Prefect between two segments are {share:.3%} of "
            f"{LONG_SEGMENT_SECONDS:.0f} s (target {SHARE_TARGET:.0%}: "
            f"{'met' if share <= SHARE_TARGET else 'missed'}), even if training waited for them."
        )
    return lines


def log_line(few: SegmentCosts, many: SegmentCosts) -> str:
    """Two runs that differ in the steps of a segment: each task run leaves its line, and a step must leave none."""
    beyond = [one.gained.rows["log"] - one.gained.rows["task_run"] for one in (few, many)]
    bounded = beyond[1] - beyond[0] <= 0.01 * many.steps
    return (
        f"Log lines beyond one for each task run: {beyond[0]} after {few.steps:,} steps, {beyond[1]} after "
        f"{many.steps:,} (target, they do not grow with the steps: {'met' if bounded else 'missed'})."
    )


def measure_segments(
    server: Server, kind: str, directory: Path, *, pairs: int, segments: int, steps: int, row_seconds: float
) -> SegmentCosts:
    """One run of one host and one device; see `benchmarks.segment_loop`."""
    name = f"{kind}-{steps}"
    order = Order(
        config=tiny_run(directory, name, hosts=1, save_interval=steps),
        pairs=pairs,
        segments=segments,
        server_pids=server.pids,
    )
    order_path, answer, output = (directory / f"{name}.{what}" for what in ("order.json", "answer.json", "txt"))
    order_path.write_text(order.model_dump_json())
    before = server.contents()
    command = [sys.executable, "-m", "benchmarks.segment_loop", str(order_path), str(answer)]
    environment = {**server.environment, ROW_SECONDS_VARIABLE: str(row_seconds)}
    with output.open("wb") as file, program(command, environment, file) as process:
        try:
            code = process.wait(_FLOW_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        raise BenchmarkError(f"the flow process ended with {code}:\n{tail(output)}")
    blocks = TypeAdapter(list[Block]).validate_json(answer.read_bytes())
    return SegmentCosts(
        server=kind,
        steps_per_segment=steps,
        blocks=blocks,
        prefect_segments=1 + pairs * segments,
        gained=server.contents() - before,
    )


def measure_all_segments(directory: Path, kinds: Sequence[str], pairs: int, segments: int) -> list[SegmentCosts]:
    """Each kind of server, and the first one again with ten times the steps and one pair of blocks."""
    found = []
    for kind in kinds:
        say(f"segments  {TITLES[kind]}: {pairs} pairs of blocks of {segments} segments")
        with serving(kind, directory) as server:
            usual = measure_segments(
                server,
                kind,
                directory,
                pairs=pairs,
                segments=segments,
                steps=_STEPS_PER_SEGMENT,
                row_seconds=_ROW_SECONDS,
            )
            found.append(usual)
            say(f"  {statistics.median(usual.added(gap)):+.2f} ms between segments")
            if kind == kinds[0]:
                steps = 10 * _STEPS_PER_SEGMENT
                say(f"  one pair with segments of {steps} steps, for the log")
                many = measure_segments(
                    server, kind, directory, pairs=1, segments=segments, steps=steps, row_seconds=0.0
                )
    return [*found, many]


# --- growth --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasuredGrowth:
    """From more hosts being offered to the first step on all of them. Times in seconds since the epoch."""

    offered: float
    event: float
    """When the pool's event occurred on which the flow was started."""
    created: float
    picked_up: float
    """By the runner, which then starts a process."""
    running: float
    """The process has imported Prefect and the flow, and Prefect lets it run."""
    given: float
    recovered: Recovered

    @property
    def seconds(self) -> float:
        """From the event to the first step: what the target speaks of."""
        return self.recovered.time - self.event

    @property
    def last_step(self) -> float:
        return self.recovered.time - self.recovered.down_seconds

    def path(self) -> dict[str, float]:
        """The time from the offer to the first step, divided without gap or overlap."""
        moments = {
            "the new hosts are ready, event": self.event,
            "automation: flow run created": self.created,
            "runner: picked up": self.picked_up,
            "process: imports, Prefect's engine": self.running,
            "flow: hosts given": self.given,
            "the last step before": self.last_step,
            "the first step on the larger group": self.recovered.time,
        }
        lengths, before = {}, self.offered
        for name, moment in moments.items():
            lengths[name], before = moment - before, moment
        return lengths


def growth_table(growths: Sequence[MeasuredGrowth]) -> Table:
    paths = [growth.path() for growth in growths]
    columns = ("s", "median", "min", "max")
    rows = [_row(f"… {name}", [path[name] for path in paths]) for name in paths[0]]
    phases = [name for name in growths[0].recovered.phases if all(name in one.recovered.phases for one in growths)]
    rows += [_row(f"    of it {name}", [one.recovered.phases[name] for one in growths]) for name in phases]
    rows.append(_row("from the event to the first step", [one.seconds for one in growths]))
    hosts = f"{growths[0].recovered.from_hosts} to {growths[0].recovered.to_hosts} hosts"
    return table(f"How a run grows from {hosts}", columns, rows)


def _row(name: str, values: Sequence[float]) -> tuple[str, ...]:
    summary = Summary.of(values)
    return (name, *(f"{value:.2f}" for value in (summary.median, summary.least, summary.most)))


def growth_lines(growths: Sequence[MeasuredGrowth]) -> list[str]:
    seconds = statistics.median(one.seconds for one in growths)
    ordering = statistics.median(one.given - one.event for one in growths)
    down = statistics.median(one.recovered.down_seconds for one in growths)
    cold = statistics.median(
        sum(one.recovered.phases.get(name, 0.0) for name in ("import", "trace", "compile")) for one in growths
    )
    lost = sum(one.recovered.step - one.recovered.resumed_from for one in growths)
    verdict = "met" if seconds <= GROWTH_TARGET_SECONDS else "missed"
    return [
        f"From the event to the first step on the larger group: {seconds:.1f} s "
        f"(target {GROWTH_TARGET_SECONDS:.0f} s: {verdict}).",
        f"{ordering:.1f} s of it until the hosts are given, during which the run trains on. Down: {down:.1f} s, of "
        f"which workers that start cold take {cold:.1f} s to import, trace and compile.",
        f"Growths lost {lost} steps (target 0: {'met' if lost == 0 else 'missed'}).",
    ]


class Service:
    """`shoal serve` with a pool and one run, from `with` to its end."""

    def __init__(self, directory: Path, hosts: int, poll_seconds: float) -> None:
        self._directory = directory
        self._hosts = hosts
        config = tiny_run(directory, "growth", hosts=hosts, save_interval=50)
        self.store: LocalStore = run_store(config.storage, config.run_name)
        (directory / "run.json").write_text(config.model_dump_json())
        self._path = directory / "serve.yaml"
        port = free_port()
        settings = {
            "port": port,
            "poll_seconds": poll_seconds,
            "allow": {"jobs": [JOB], "storage_roots": [config.storage]},
            "runs": [{"name": "growth", "config": str(directory / "run.json")}],
            "pool": {"hosts": hosts, "engine": config.engine.model_dump(mode="json")},
            "look_at_pool_seconds": 3600,
        }
        self._path.write_text(yaml.safe_dump(settings))
        self._output = directory / "serve.txt"
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=30.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = [str(Path(sys.executable).with_name("shoal")), "serve", str(self._path)]
        environment = {**os.environ, ROW_SECONDS_VARIABLE: "0.05"}
        with self.api, self._output.open("wb") as file, program(command, environment, file) as self._process:
            self.wait(lambda: "serving train/train" in self._output.read_text(errors="replace"), "the service serves")
            self.wait(lambda: len(self.view().free) == self._hosts, "the hosts of the pool are ready")
            yield

    def start_run(self) -> None:
        deployment = self._call("GET", "/deployments/name/train/growth")
        body = {"parameters": deployment["parameters"], "state": {"type": "SCHEDULED"}}
        self._call("POST", f"/deployments/{deployment['id']}/create_flow_run", body)

    def offer(self, hosts: int) -> float:
        """As `shoal pool --hosts`. Returns when, in seconds since the epoch."""
        now = time.time()
        RemotePool.find(service_id(self._path)).offer(hosts)
        return now

    def view(self) -> wire.PoolView:
        return RemotePool.find(service_id(self._path)).view()

    def wait_training_on(self, hosts: int) -> None:
        def trains() -> bool:
            remote = RemoteController.find(self.store)
            live = remote.live() if remote is not None else None
            return live is not None and live["stepping"] and len(live["topology"]["hosts"]) == hosts

        self.wait(trains, f"the run trains on {hosts} hosts")

    def grow(self, hosts: int) -> MeasuredGrowth:
        """Offer so many hosts and take the times until the run has made a step on all of them."""
        offered = self.offer(hosts)
        recovered = self.wait(lambda: self._recovered(offered, hosts), f"a step on {hosts} hosts")
        flow_run, given = self.wait(lambda: self._giving_flow_run(offered), "the flow run that gave the hosts")
        states = self._call("GET", f"/flow_run_states/?flow_run_id={flow_run['id']}")
        at = {state["type"]: seconds_of(state["timestamp"]) for state in states}
        events = [seconds for seconds in self._events(offered) if seconds <= seconds_of(flow_run["created"])]
        if not events:
            raise BenchmarkError("the flow run that gave the hosts was started by no event")
        return MeasuredGrowth(
            offered=offered,
            event=max(events),
            created=seconds_of(flow_run["created"]),
            picked_up=at["PENDING"],
            running=at["RUNNING"],
            given=given,
            recovered=recovered,
        )

    def _recovered(self, since: float, hosts: int) -> Recovered | None:
        events = RunHistory.load(self.store).events
        found = [event for event in events if isinstance(event, Recovered) and event.time > since]
        return next((event for event in found if event.to_hosts == hosts), None)

    def _giving_flow_run(self, since: float) -> tuple[dict[str, Any], float] | None:
        """The newest, and when it had given hosts."""
        tasks = self._call("POST", "/task_runs/filter", {"sort": "END_TIME_DESC", "limit": 50})
        given = [task for task in tasks if task["task_key"].startswith("enlarge-") and task["end_time"]]
        given = [task for task in given if seconds_of(task["end_time"]) > since]
        if not given:
            return None
        return self._call("GET", f"/flow_runs/{given[0]['flow_run_id']}"), seconds_of(given[0]["end_time"])

    def _events(self, since: float) -> list[float]:
        """When those occurred that say that a run can grow."""
        events = self._call("POST", "/events/filter", {"filter": {"event": {"name": [CAPACITY_CHANGED]}}, "limit": 50})
        possible = [event for event in events["events"] if event["resource"][GROWTH_LABEL] == "possible"]
        return [seconds for event in possible if (seconds := seconds_of(event["occurred"])) > since]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        def ask() -> httpx.Response | None:
            answer = self.api.request(method, path, json=body)
            return None if answer.status_code == 503 else answer  # SQLite serves one writer at a time

        return self.wait(ask, f"{method} {path}").raise_for_status().json()

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            # In the moment of a change, neither the keeper nor a controller may answer.
            with contextlib.suppress(RefusedError, httpx.TransportError, urllib.error.URLError):
                if found := condition():
                    return found
            if (code := self._process.poll()) is not None:
                raise BenchmarkError(f"`shoal serve` ended with {code}:\n{tail(self._output)}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not within {_PATIENCE_SECONDS:.0f} s: {what}\n{tail(self._output)}")
            time.sleep(_POLL_SECONDS)


def seconds_of(timestamp: str) -> float:
    """Prefect's way of writing times, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(timestamp).timestamp()


def measure_growths(directory: Path, hosts: int, growths: int, poll_seconds: float) -> list[MeasuredGrowth]:
    few = hosts // 2
    service = Service(directory, hosts, poll_seconds)
    found: list[MeasuredGrowth] = []
    say(f"growth  a service with a pool of {hosts} hosts")
    with service.running():
        service.offer(few)
        service.wait(lambda: len(service.view().free) == few, f"{few} hosts are left")
        service.start_run()
        for number in range(1, growths + 1):
            service.wait_training_on(few)
            time.sleep(_FOLLOW_SECONDS)
            found.append(service.grow(hosts))
            say(f"  {number}/{growths}  {found[-1].seconds:.2f} s from the event to the first step on {hosts} hosts")
            service.offer(few)
    return found


# --- the command ---------------------------------------------------------------------------------------------------


def tiny_run(directory: Path, name: str, *, hosts: int, save_interval: int) -> RunConfig:
    return parse_config(
        {
            "run_name": name,
            "storage": str(directory / "runs"),
            "steps": _STEPS,
            "global_batch_size": hosts,
            "job": JOB,
            "num_hosts": {"min": 1, "max": hosts},
            "engine": {"devices_per_host": 1},
            "checkpoint": {"save_interval_steps": save_interval},
        }
    )


@contextlib.contextmanager
def program(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Tied to this process, and ended with the block."""
    process = subprocess.Popen(
        tethered(command, signal.SIGTERM),
        env=dict(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    try:
        yield process
    finally:
        end(process, signal.SIGTERM, _STOP_SECONDS)


def tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-30:])


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: a list with commas."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if not chosen or not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose some of {','.join(known)}")
        return chosen

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    options_parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=formatter)
    add = options_parser.add_argument
    add("--parts", type=some_of(PARTS), default=",".join(PARTS), metavar="LIST", help="what to measure")
    add("--servers", type=some_of(KINDS), default=",".join(KINDS), metavar="LIST", help="for the segments")
    add("--pairs", type=positive, default=5, metavar="N", help="of blocks of segments, with Prefect and without")
    add("--segments", type=positive, default=50, metavar="N", help="of each block")
    add("--growths", type=positive, default=5, metavar="N", help="of the run in the service")
    add("--hosts", type=positive, default=4, metavar="N", help="that the run grows to, from half of them")
    poll = ServeConfig.model_fields["poll_seconds"].default
    add("--poll-seconds", type=float, default=poll, metavar="S", help="poll_seconds of the service")
    add("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    options = options_parser.parse_args(arguments)
    if options.hosts < 2:
        options_parser.error("--hosts must be at least 2: half of them has to be one")
    if options.segments <= LEFT_OUT:
        options_parser.error(f"--segments must be more than {LEFT_OUT}: the first of each block are left out")

    def work(directory: Path) -> None:
        machine, busy = describe_machine(), busy_with_others()
        costs: list[SegmentCosts] = []
        growths: list[MeasuredGrowth] = []
        tables: list[Table] = []
        lines: list[str] = []
        if "segments" in options.parts:
            kinds = [kind for kind in options.servers if kind != "postgres" or find_postgres() is not None]
            if len(kinds) < len(options.servers):
                say("PostgreSQL is not installed and left out")
            *costs, many = measure_all_segments(directory, kinds, options.pairs, options.segments)
            tables += [costs_table(costs), database_table([*costs, many])]
            lines += [*segment_lines(costs), log_line(costs[0], many)]
            costs.append(many)
        if "growth" in options.parts:
            growths = measure_growths(directory, options.hosts, options.growths, options.poll_seconds)
            tables.append(growth_table(growths))
            lines += growth_lines(growths)
        print_results(machine, tables, [*lines, f"Others used {busy:.0%} of the machine before."])
        figures = {
            "machine": machine,
            "busy_before": busy,
            "segments": TypeAdapter(list[SegmentCosts]).dump_python(costs, mode="json"),
            "growths": TypeAdapter(list[MeasuredGrowth]).dump_python(growths, mode="json"),
        }
        write_json(options.json, figures)

    return run_benchmark(work)


if __name__ == "__main__":
    sys.exit(main())
