"""Capacity that comes and goes faster than a run should follow, and capacity that a trace or a program decides."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import STEPS, Run, assert_complete, assert_same_training
from trainer.records import (
    CapacityChanged,
    GroupEnded,
    GroupStarting,
    GrowHeld,
    HostChanged,
    Incident,
    Recovered,
    Waiting,
)

NewRun = Callable[..., Run]
pytestmark = pytest.mark.slow


def sizes(run: Run) -> list[int]:
    return [event.topology.num_processes for event in run.of(GroupStarting)]


def test_a_flapping_host_costs_one_resize_and_is_taken_back_when_it_stays(new_run: NewRun, reference: Run) -> None:
    """4↔3 every five seconds for forty: it never stays for the twelve seconds that are asked for."""
    run = new_run(
        # Steps of about a second, without work for this machine.
        env={"SHOAL_TEST_ROW_SECONDS": "0.2"},
        **{
            "elastic.grow_after_stable_seconds": 12.0,
            "elastic.min_dwell_seconds": 5.0,
            # One segment: nothing but the timer of the hold looks at the capacity again once it has settled.
            "checkpoint.save_interval_steps": STEPS,
        },
    )
    run.start()
    run.wait_step(2)
    flapping_since = time.monotonic()
    for number in range(9):
        run.set_capacity(3 if number % 2 == 0 else 4)
        time.sleep(max(0.0, flapping_since + 5.0 * (number + 1) - time.monotonic()))
    run.look()
    assert sizes(run) == [4, 3], run.story()
    assert run.trained[-1][1].step > 2, "steps advance meanwhile"

    before = len(run.events)
    run.set_capacity(4)
    held = run.wait_event(GrowHeld, since=before)
    said = run.shoal("status", str(run.directory)).stdout
    assert "not growing" in said, said
    ready = run.wait_event(HostChanged, lambda event: event.state == "ready", since=before)
    ended = run.wait_event(GroupEnded, since=before)
    assert ended.monotonic - ready.monotonic >= 12.0
    assert (held.rule, held.num_hosts) == ("stable", 4)
    assert held.until is not None
    assert held.until <= ready.time + 12.0 + 0.1
    assert_complete(run, run.wait_end())
    assert sizes(run) == [4, 3, 4]
    assert run.of(Incident) == []
    # Once for each time that there was something to be held back, however often that was looked at.
    assert len(run.of(GrowHeld)) <= 5
    assert "not growing to 4 hosts until" in run.output
    assert_same_training(run, reference, abandoned=0)


def spot_trace(path: Path) -> None:
    """As recorded ones are: eight nodes at first, bursts of both kinds, none at all for half a minute of replay."""
    chance = random.Random(7)
    lines, present, number = [], list[str](), 0

    def change(second: float, target: int) -> None:
        nonlocal number
        while len(present) < target:
            number += 1
            present.append(f"node{number}")
            lines.append(f"{round(second * 600_000)},add,{present[-1]}")
        while len(present) > target:
            lines.append(f"{round(second * 600_000)},remove,{present.pop(chance.randrange(len(present)))}")

    change(0.0, 8)
    for second in range(2, 20):
        if chance.random() < 0.6:
            change(second, chance.choice([3, 4, 5, 6, 7, 8]))
    change(20.0, 0)
    for second in range(50, 70):
        change(second, chance.choice([4, 5, 6, 7, 8]))
    change(70.0, 8)
    path.write_text("\r\n".join(lines) + "\r\n")


def test_a_spot_trace_is_trained_through_600_times_faster(new_run: NewRun, reference: Run, tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    spot_trace(trace)
    dwell_seconds = 5.0
    run = new_run(
        env={"SHOAL_TEST_ROW_SECONDS": "0.1"},
        **{
            "capacity.provider": "trace",
            "capacity.trace_path": str(trace),
            "capacity.trace_speed": 600.0,
            "capacity.trace_hosts": 4,
            "elastic.grow_after_stable_seconds": 2.0,
            "elastic.min_dwell_seconds": dwell_seconds,
        },
    )
    run.start()
    waiting = run.wait_event(Waiting, lambda event: event.usable == 0)
    run.wait_event(CapacityChanged, lambda event: event.monotonic > waiting.monotonic and event.offered > 0)
    assert_complete(run, run.wait_end())
    assert run.of(Incident) == []
    changes, resizes = run.of(CapacityChanged), run.of(Recovered)
    assert {event.source for event in changes} == {"trace"}
    assert {event.offered for event in changes} >= {0, 2, 3, 4}
    assert any(resize.down_seconds > 10.0 for resize in resizes), "it stood still while there were no hosts"
    grown = [resize for resize in resizes if resize.to_hosts > resize.from_hosts]
    trained_seconds = sum(metrics.step_seconds for _, metrics in run.trained)
    assert len(grown) <= 1 + trained_seconds / dwell_seconds
    assert len(resizes) <= len(changes) / 2, run.story()
    assert_same_training(run, reference, abandoned=0)


def test_a_program_decides_how_many_hosts_there_are_and_at_what_price(
    new_run: NewRun, reference: Run, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"

    def say(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(answer)

    say('{"hosts": 2, "price_per_host_hour": 1}')
    run = new_run(
        env={"SHOAL_TEST_ROW_SECONDS": "0.05"},
        **{
            "capacity.provider": "command",
            "capacity.command": [sys.executable, "-S", "-c", f"print(open({str(answer)!r}).read())"],
            "capacity.poll_seconds": 0.5,
            "capacity.max_price_per_host_hour": 2.0,
        },
    )
    run.start()
    run.wait_step(3)
    assert sizes(run) == [2]
    refused = run.shoal("capacity", str(run.directory), "--hosts", "4")
    assert refused.returncode == 2
    assert "follows a command (capacity.provider)" in refused.stderr

    say('{"hosts": 9, "price_per_host_hour": 2.5}')
    dear = run.wait_event(CapacityChanged, lambda event: event.offered == 0)
    assert (dear.source, dear.price_per_host_hour) == ("command", 2.5)
    before = len(run.events)
    run.wait_event(Waiting, lambda event: event.monotonic > dear.monotonic)

    say('{"hosts": 9, "price_per_host_hour": 2.0}')
    cheap = run.wait_event(CapacityChanged, since=before)
    assert (cheap.offered, cheap.price_per_host_hour) == (4, 2.0), "never more than num_hosts.max"
    assert_complete(run, run.wait_end())
    assert sizes(run) == [2, 4]
    assert run.of(Incident) == []
    assert_same_training(run, reference, abandoned=0)
