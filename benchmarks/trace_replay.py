"""What a recorded spot trace does to a run: `python -m benchmarks.trace_replay TRACE`. See README.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.common import (
    BenchmarkError,
    ShoalRun,
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
from trainer.compute.data import expected_digest
from trainer.config import RunConfig
from trainer.history import RunHistory
from trainer.jobs.registry import make_job
from trainer.records import CapacityChanged, GrowHeld, Incident, Recovered, Waiting

_END_SECONDS = 3600.0


def figures(history: RunHistory) -> dict[str, float]:
    """What happened, in the order of the table. Seconds, steps and counts."""

    def count(kind: type) -> int:
        return sum(isinstance(event, kind) for event in history.events)

    recovered = [event for event in history.events if isinstance(event, Recovered)]
    return {
        "seconds": history.events[-1].time - history.events[0].time,
        "goodput": history.goodput.fraction or 0.0,
        "changes of capacity": count(CapacityChanged),
        "grown": sum(event.planned and event.to_hosts > event.from_hosts for event in recovered),
        "shrunk": sum(event.planned and event.to_hosts < event.from_hosts for event in recovered),
        "other resizes": sum(event.planned and event.to_hosts == event.from_hosts for event in recovered),
        "seconds down": sum(event.down_seconds for event in recovered),
        "growth held": count(GrowHeld),
        "waits": count(Waiting),
        "incidents": count(Incident),
        "steps trained again": len(history.abandoned),
    }


def check_digests(history: RunHistory, config: RunConfig) -> None:
    """Raises BenchmarkError: a step is missing, or did not consume exactly its samples."""
    if [metrics.step for metrics in history.metrics] != list(range(1, config.steps + 1)):
        raise BenchmarkError(f"not every one of the {config.steps} steps is there once")
    source = make_job(config.job, config.job_params).data(config.data.path)
    for metrics in history.metrics:
        expected = expected_digest(
            source, seed=config.seed, step=metrics.step, global_batch_size=config.global_batch_size
        )
        if metrics.sample_digest != expected:
            raise BenchmarkError(f"step {metrics.step} did not consume its samples")


def replay_table(values: dict[str, float]) -> Table:
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else str(value)) for name, value in values.items()]
    return table("replay", ("", "figure"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("trace", type=Path, help="CSV of milliseconds,add|remove,node")
    options.add_argument("--speed", type=float, default=600.0, help="times faster than recorded")
    options.add_argument("--steps", type=positive, default=300, help="steps of the run")
    options.add_argument("--stable-seconds", type=float, default=2.0, help="elastic.grow_after_stable_seconds")
    options.add_argument("--dwell-seconds", type=float, default=5.0, help="elastic.min_dwell_seconds")
    asked = options.parse_args(arguments)

    def work(directory: Path) -> None:
        config = quickstart(
            directory,
            "replay",
            asked.hosts,
            asked.devices_per_host,
            steps=asked.steps,
            capacity__provider="trace",
            capacity__trace_path=str(asked.trace.resolve()),
            capacity__trace_speed=asked.speed,
            capacity__trace_hosts=asked.hosts,
            elastic__grow_after_stable_seconds=asked.stable_seconds,
            elastic__min_dwell_seconds=asked.dwell_seconds,
        )
        say(f"{asked.steps} steps through {asked.trace.name}, {asked.speed:g} times faster, with 0-{asked.hosts} hosts")
        with ShoalRun(config, directory) as run:
            history = run.wait_complete(_END_SECONDS)
        check_digests(history, config)
        machine, values = describe_machine(), figures(history)
        print_results(machine, [replay_table(values)], ["every step is there once and consumed exactly its samples"])
        write_json(asked.json, {"machine": machine, "config": config.model_dump(mode="json"), **values})

    return run_benchmark(work)


if __name__ == "__main__":
    sys.exit(main())
