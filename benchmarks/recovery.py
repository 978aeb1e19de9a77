"""How long is training down when a host is lost? A real run that loses hosts by SIGKILL, again and again.

    python -m benchmarks.recovery [--kills 10] [--hosts 4] [--devices-per-host 2] [--seed 0] [--json FILE]

One `shoal train` of the quickstart. Whenever the group is at full size and some steps past a commit, a random host's
process group is killed; the run shrinks, gets a new host after `engine.replacement_delay_seconds`, and grows back.
See benchmarks/README.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.table import Table

from benchmarks.common import (
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
from trainer.control.remote import RemoteController
from trainer.errors import RefusedError
from trainer.records import FirstStep, GroupStarting, Incident, JournalEvent, PhaseName, Recovered, WorkerPhase

T = TypeVar("T")

# Never reached: the run is stopped after the last kill.
_STEPS = 1_000_000
_STEPS_PAST_COMMIT = (3, 10)
_PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.1

WORKER_PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
PATH_PHASES = ("detect", "stop", "flow", "plan", *WORKER_PHASES)
"""In the order in which they happen, `other` left out."""
PHASE_TITLES = {
    "detect": "detect",
    "stop": "stop",
    "flow": "flow (Prefect, between segment and resize)",
    "plan": "plan",
    "import": "start (import)",
    "first_step": "first step",
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    host_id: str
    step: int
    """Last finished step, as asked just before."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From one kill to the next finished step."""

    host_id: str
    step: int
    """Last finished step of the old group."""
    steps_lost: int
    from_hosts: int
    to_hosts: int
    seconds: float
    """From the kill to the first finished step of the next group, by the wall clock."""
    slowest: Mapping[str, float]
    """Seconds of each phase on the worker that took longest for it, as the run itself says. Phases of different workers
    overlap; `other` is what is missing to `seconds`, and is negative where they do."""
    path: Mapping[str, float]
    """Seconds by which the last worker's end of each phase came after that of the phase before. These add up."""


@dataclass(frozen=True, kw_only=True)
class Grow:
    """The planned way back to full size."""

    from_hosts: int
    to_hosts: int
    seconds: float
    """Between the last finished step before and the first one after."""
    steps_lost: int
    slowest: Mapping[str, float]


# --- from the journal ----------------------------------------------------------------------------------------------


def recovery_from(kill: Kill, events: Sequence[JournalEvent]) -> Recovery | None:
    """What the journal says of one kill, or None if the run has not recovered yet."""
    after = [event for event in events if event.time >= kill.time]
    incident = first_of(after, Incident, lambda event: kill.host_id in event.host_ids)
    if incident is None:
        return None
    recovered = first_of(after, Recovered, lambda event: event.incarnation > incident.incarnation)
    if recovered is None:
        return None
    incarnation = recovered.incarnation
    first_step = first_of(after, FirstStep, lambda event: event.incarnation == incarnation)
    # Without a second failure on the way these are one and the same.
    first_start = first_of(after, GroupStarting, lambda event: event.incarnation > incident.incarnation)
    last_start = first_of(after, GroupStarting, lambda event: event.incarnation == incarnation)
    assert first_step is not None
    assert first_start is not None
    assert last_start is not None
    seconds = first_step.time - kill.time

    stop, plan = recovered.phases["stop"], recovered.phases["plan"]
    path = {
        "detect": incident.time - stop - kill.time,
        "stop": stop,
        "flow": first_start.time - plan - incident.time,
        "plan": plan,
    }
    before = last_start.time
    for phase in WORKER_PHASES:
        ends = [
            event.time
            for event in after
            if isinstance(event, WorkerPhase) and event.incarnation == incarnation and event.phase == phase
        ]
        # Nobody waits for the first step of the others: process 0 reports it.
        end = first_step.time if phase == "first_step" else max(ends, default=before)
        path[phase] = end - before
        before = end
    return Recovery(
        host_id=kill.host_id,
        step=recovered.step,
        steps_lost=recovered.step - recovered.resumed_from,
        from_hosts=recovered.from_hosts,
        to_hosts=recovered.to_hosts,
        seconds=seconds,
        slowest=with_other(recovered.phases, seconds),
        path=with_other(path, seconds),
    )


def grows_in(events: Sequence[JournalEvent], full_size: int) -> list[Grow]:
    return [
        Grow(
            from_hosts=event.from_hosts,
            to_hosts=event.to_hosts,
            seconds=event.down_seconds,
            steps_lost=event.step - event.resumed_from,
            slowest=with_other(event.phases, event.down_seconds),
        )
        for event in events
        if isinstance(event, Recovered) and event.planned and event.from_hosts < event.to_hosts == full_size
    ]


def with_other(phases: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {**phases, "other": seconds - math.fsum(phases.values())}


def first_of(events: Sequence[JournalEvent], kind: type[T], accept: Callable[[T], bool]) -> T | None:
    return next((event for event in events if isinstance(event, kind) and accept(event)), None)


# --- figures -------------------------------------------------------------------------------------------------------


def summary_table(recoveries: Sequence[Recovery], grows: Sequence[Grow]) -> Table:
    measured: list[tuple[str, Sequence[float], str]] = [
        ("kill to next finished step, s", [one.seconds for one in recoveries], ".2f"),
        ("steps lost by a kill", [one.steps_lost for one in recoveries], ".0f"),
    ]
    if grows:
        measured += [
            ("down for the planned grow, s", [one.seconds for one in grows], ".2f"),
            ("steps lost by the planned grow", [one.steps_lost for one in grows], ".0f"),
        ]
    rows = [(title, str(len(values)), *_cells(values, form)) for title, values, form in measured]
    return table("Down time", ("", "times", "median", "p90", "min", "max"), rows)


def phases_table(title: str, columns: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """A row per phase, and per column of `columns` its median, p90, min and max. What nobody has is left out."""
    names = [name for name in (*PATH_PHASES, "other") if any(name in one for ones in columns.values() for one in ones)]
    rows = []
    for name in names:
        cells = []
        for ones in columns.values():
            values = [one[name] for one in ones if name in one]
            cells += _cells(values, ".2f") if values else ["-"] * 4
        rows.append((PHASE_TITLES.get(name, name), *cells))
    headers = [f"{column}: median" if part == "median" else part for column in columns for part in _PARTS]
    return table(title, ("phase, s", *headers), rows)


_PARTS = ("median", "p90", "min", "max")


def _cells(values: Sequence[float], form: str) -> list[str]:
    summary = Summary.of(values)
    return [format(value, form) for value in (summary.median, summary.p90, summary.least, summary.most)]


def result_lines(recoveries: Sequence[Recovery], grows: Sequence[Grow], busy_before: float) -> list[str]:
    path = {name: statistics.median(one.path[name] for one in recoveries) for name in (*PATH_PHASES, "other")}
    longest = sorted(path, key=lambda name: -path[name])[:3]
    lines = [
        "Longest on the critical path: "
        + ", ".join(f"{PHASE_TITLES.get(name, name)} {path[name]:.2f} s" for name in longest)
        + "."
    ]
    if grows:
        lost = sum(one.steps_lost for one in grows)
        lines.append(f"Planned grows lost {lost} steps (target 0: {'met' if lost == 0 else 'missed'}).")
    lines.append(f"Others used {busy_before:.0%} of the machine before the run.")
    return lines


# --- measuring -----------------------------------------------------------------------------------------------------


class Attacked:
    """A living run, and what is done to it."""

    def __init__(self, run: ShoalRun, hosts: int) -> None:
        self._run = run
        self._hosts = hosts

    def kill_at_full_size(self, choose: random.Random) -> Kill:
        """Wait until the group is whole and a few steps past a commit, then kill one of its hosts."""
        past_commit = choose.randint(*_STEPS_PAST_COMMIT)
        step = self._wait(lambda: self._step_at_full_size(past_commit), f"{self._hosts} hosts training past a commit")
        victim = choose.choice(sorted(self._controller().hosts(), key=lambda host: str(host["host_id"])))
        killed_at = time.time()
        os.killpg(victim["process_group"], signal.SIGKILL)
        return Kill(host_id=victim["host_id"], step=step, time=killed_at)

    def wait_recovered(self, kill: Kill) -> Recovery:
        return self._wait(
            lambda: recovery_from(kill, self._run.look()), f"a finished step after {kill.host_id} was killed"
        )

    def wait_full_size(self) -> None:
        self._wait(lambda: self._step_at_full_size(0), f"{self._hosts} hosts training again")

    def _step_at_full_size(self, past_commit: int) -> int | None:
        # Before it is up, and in the moment of a change, a controller may not answer.
        with contextlib.suppress(RefusedError):
            remote = RemoteController.find(self._run.store)
            live = remote.live() if remote is not None else None
            if live is None or live["topology"] is None or len(live["topology"]["hosts"]) < self._hosts:
                return None
            stepping = any(
                isinstance(event, FirstStep) and event.incarnation == live["incarnation"] for event in self._run.look()
            )
            if stepping and 0 < live["committed_step"] <= live["step"] - past_commit:
                return int(live["step"])
        return None

    def _controller(self) -> RemoteController:
        remote = RemoteController.find(self._run.store)
        if remote is None:
            raise BenchmarkError(f"the run has no controller any more:\n{self._run.output_tail()}")
        return remote

    def _wait(self, condition: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := condition()) is None:
            self._run.check_alive()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not within {_PATIENCE_SECONDS:.0f} s: {what}\n{self._run.output_tail()}")
            time.sleep(_POLL_SECONDS)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    options_parser = parser("Kill hosts of a living run and take the time until it trains again.")
    options_parser.add_argument("--kills", type=positive, default=10, metavar="N", help="hosts to kill")
    options_parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses hosts and moments")
    options = options_parser.parse_args(arguments)
    if options.hosts < 2:
        options_parser.error("--hosts must be at least 2: somebody has to survive")

    def work(directory: Path) -> None:
        machine, busy = describe_machine(), busy_with_others()
        config = quickstart(directory, "recovery", options.hosts, options.devices_per_host, steps=_STEPS)
        choose = random.Random(options.seed)
        recoveries: list[Recovery] = []
        with ShoalRun(config, directory) as run:
            attacked = Attacked(run, options.hosts)
            for number in range(1, options.kills + 1):
                kill = attacked.kill_at_full_size(choose)
                say(f"kill {number}/{options.kills}  {kill.host_id} after step {kill.step}")
                recovery = attacked.wait_recovered(kill)
                recoveries.append(recovery)
                say(
                    f"  trains again after {recovery.seconds:.2f} s, {recovery.from_hosts}→{recovery.to_hosts} hosts, "
                    f"{recovery.steps_lost} steps lost"
                )
            attacked.wait_full_size()
            grows = grows_in(run.look(), options.hosts)
        tables = [
            summary_table(recoveries, grows),
            phases_table(
                "From the kill to the next finished step",
                {"critical path": [one.path for one in recoveries], "slowest": [one.slowest for one in recoveries]},
            ),
        ]
        if grows:
            tables.append(phases_table("The planned grow", {"slowest": [one.slowest for one in grows]}))
        print_results(machine, tables, result_lines(recoveries, grows, busy))
        document: dict[str, Any] = {
            "machine": machine,
            "options": {
                "kills": options.kills,
                "hosts": options.hosts,
                "devices_per_host": options.devices_per_host,
                "seed": options.seed,
                "save_interval_steps": config.checkpoint.save_interval_steps,
                "replacement_delay_seconds": config.engine.replacement_delay_seconds,
            },
            "busy_before": busy,
            "seconds": dataclasses.asdict(Summary.of([one.seconds for one in recoveries])),
            "recoveries": [dataclasses.asdict(one) for one in recoveries],
            "grows": [dataclasses.asdict(one) for one in grows],
        }
        write_json(options.json, document)

    return run_benchmark(work)


if __name__ == "__main__":
    sys.exit(main())
