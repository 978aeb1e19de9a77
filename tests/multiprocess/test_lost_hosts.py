"""Hosts and workers are killed at every moment of a run's life; training goes on, and nothing of it changes but speed.

The world: 4 hosts of 2 devices, 60 steps, a checkpoint every 10. A lost host is back after 1 s.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests.multiprocess.harness import SAVE_INTERVAL, Run, assert_complete, assert_same_training
from trainer.records import (
    CheckpointCommitted,
    CheckpointSaving,
    GroupReady,
    GroupStarting,
    HostChanged,
    Incident,
    Recovered,
    SegmentEnded,
    WorkerPhase,
)

NewRun = Callable[..., Run]
HOSTS = ("host-0", "host-1", "host-2", "host-3")


def chooser(request: pytest.FixtureRequest) -> random.Random:
    """Random choices that a failure can be repeated with: SHOAL_TEST_SEED, else drawn anew and printed."""
    seed = int(os.environ.get("SHOAL_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"{request.node.name}: SHOAL_TEST_SEED={seed}")
    return random.Random(seed)


def sizes(run: Run) -> list[int]:
    """Hosts of each worker group, in order."""
    return [event.topology.num_processes for event in run.of(GroupStarting)]


def incidents(run: Run) -> list[tuple[str, tuple[str, ...]]]:
    return [(event.cause, event.host_ids) for event in run.of(Incident)]


def test_a_run_that_loses_a_worker_and_then_a_host_ends_like_an_undisturbed_one(
    new_run: NewRun, reference: Run, request: pytest.FixtureRequest
) -> None:
    choose = chooser(request)
    run = new_run()
    run.start()

    worker_host, at = choose.choice(HOSTS), choose.randrange(SAVE_INTERVAL + 2, 20)
    run.wait_step(at)
    before = run.hosts()
    run.kill_worker(worker_host)
    crash = run.wait_event(Incident)
    assert (crash.cause, crash.host_ids, crash.alive, crash.total) == ("worker_crashed", (worker_host,), 4, 4)
    assert crash.step >= at
    assert "SIGKILL" in crash.message
    recovered = run.wait_event(Recovered)
    assert (recovered.from_hosts, recovered.to_hosts, recovered.planned) == (4, 4, False)
    assert {host: state["pid"] for host, state in run.hosts().items()} == {h: s["pid"] for h, s in before.items()}

    lost_host, at = choose.choice(HOSTS), choose.randrange(25, 45)
    run.wait_step(at)
    run.kill_host(lost_host)
    loss = run.wait_event(Incident, lambda event: event.cause != "worker_crashed")
    assert (loss.cause, loss.host_ids, loss.alive, loss.total) == ("host_lost", (lost_host,), 3, 4)
    assert loss.step >= at

    assert_complete(run, run.wait_end())
    assert sizes(run) == [4, 4, 3, 4], run.story()
    assert [(r.cause, r.from_hosts, r.to_hosts, r.planned) for r in run.of(Recovered)] == [
        ("worker_crashed", 4, 4, False),
        ("host_lost", 4, 3, False),
        ("drained", 3, 4, True),
    ]
    for recovered in run.of(Recovered):
        assert {"stop", "plan", "rendezvous", "restore", "compile", "first_step"} <= recovered.phases.keys()
    history = assert_same_training(run, reference)
    # Every step that was trained twice was lost to one of the two incidents; the way back to 4 hosts lost none.
    lost_steps = [recovered.step - recovered.resumed_from for recovered in run.of(Recovered)]
    assert lost_steps[2] == 0
    assert len(history.abandoned) == sum(lost_steps)
    # Back to the last commit, which may be the one before the last boundary while that is being saved.
    assert all(lost < 2 * SAVE_INTERVAL + 5 for lost in lost_steps)


def kill_process_zero(run: Run) -> tuple[str, ...]:
    run.wait_step(25)
    run.kill_host("host-0")
    return ("host-0",)


def kill_two_at_once(run: Run) -> tuple[str, ...]:
    run.wait_step(25)
    run.kill_host("host-1", "host-3")
    return ("host-1", "host-3")


def kill_during_first_compile(run: Run) -> tuple[str, ...]:
    run.wait_event(WorkerPhase, lambda event: event.phase == "data")
    assert not run.of(WorkerPhase, lambda event: event.phase == "compile")
    run.kill_host("host-2")
    return ("host-2",)


def kill_during_restore(run: Run) -> tuple[str, ...]:
    """Takes a first loss to get an incarnation that restores a checkpoint."""
    run.wait_step(25)
    run.kill_worker("host-1")
    run.wait_event(WorkerPhase, lambda event: event.incarnation == 2 and event.phase == "devices")
    assert not run.of(WorkerPhase, lambda event: event.incarnation == 2 and event.phase == "restore")
    run.kill_host("host-3")
    return ("host-3",)


def kill_during_a_save(run: Run) -> tuple[str, ...]:
    saving = run.wait_event(CheckpointSaving, lambda event: event.step >= 2 * SAVE_INTERVAL)
    run.kill_host("host-1")
    assert not run.of(CheckpointCommitted, lambda event: event.step == saving.step)
    return ("host-1",)


def kill_between_segments(run: Run) -> tuple[str, ...]:
    run.wait_event(SegmentEnded, lambda event: event.end_step == 3 * SAVE_INTERVAL)
    run.kill_host("host-0")
    return ("host-0",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        kill_process_zero,
        kill_two_at_once,
        kill_during_first_compile,
        kill_during_restore,
        kill_during_a_save,
        kill_between_segments,
    ],
)
def test_training_goes_on_whenever_hosts_are_lost(
    fault: Callable[[Run], tuple[str, ...]], new_run: NewRun, reference: Run
) -> None:
    run = new_run()
    run.start()
    lost = fault(run)
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference)
    # Hosts that were lost together may be noticed one after the other, but each of them once, and nothing else.
    hosts_lost = [host for cause, hosts in incidents(run) if cause == "host_lost" for host in hosts]
    assert sorted(hosts_lost) == sorted(lost), run.story()
    for host in lost:
        states = [event.state for event in run.of(HostChanged, lambda event, host=host: event.host_id == host)]
        assert states[:5] == ["starting", "ready", "lost", "starting", "ready"]
    assert sizes(run)[-1] == 4
    assert len(run.of(GroupReady)) <= len(run.of(GroupStarting))


@pytest.mark.slow
def test_hosts_that_come_back_together_start_together(new_run: NewRun, reference: Run) -> None:
    """After the loss of all four, the first that is back does not start alone to be stopped at once by the others."""
    run = new_run()
    run.start()
    run.wait_step(25)
    run.kill_host(*HOSTS)
    assert_complete(run, run.wait_end())
    assert sizes(run) == [4, 4], run.story()
    assert_same_training(run, reference)  # to the bit


@pytest.mark.slow
def test_a_frozen_host_is_lost_like_a_dead_one(new_run: NewRun, reference: Run) -> None:
    """SIGSTOP: its connection stays open and its peers wait in a collective for ever; only an unanswered ping tells."""
    run = new_run()
    run.start()
    run.wait_step(25)
    run.freeze_host("host-2")
    incident = run.wait_event(Incident, timeout=30.0)
    assert (incident.cause, incident.host_ids) == ("host_lost", ("host-2",))
    assert_complete(run, run.wait_end())
    assert sizes(run) == [4, 3, 4]
    assert_same_training(run, reference)
