"""Ctrl-C at any moment: the first stops at a step boundary with the state saved, the second ends everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.multiprocess.harness import SAVE_INTERVAL, Run, assert_complete, assert_same_training
from trainer.records import (
    CheckpointCommitted,
    GroupEnded,
    GroupReady,
    HostChanged,
    Incident,
    RunEnded,
    RunOpened,
    SegmentEnded,
    StopRequested,
    WorkerPhase,
)

NewRun = Callable[..., Run]
STOPPED = 5


def assert_stopped(run: Run, code: int) -> int:
    """Exit code 5, no process left, and the newest commit is where the run said it stopped. Returns that step."""
    assert code == STOPPED, run.story()
    run.assert_nothing_left()
    assert "Traceback" not in run.output, run.output
    ended = run.of(RunEnded)[-1]
    assert (ended.outcome, ended.cause) == ("stopped", "stopped")
    newest = run.history().newest_commit
    assert (newest.step if newest else 0) == ended.step
    return ended.step


def test_ctrl_c_on_a_terminal_stops_with_the_state_saved_and_the_same_command_goes_on(
    new_run: NewRun, reference: Run, embedded_environment: dict[str, str]
) -> None:
    """The terminal interrupts the whole foreground process group; the embedded Prefect server must not fall to it."""
    run = new_run(env={**embedded_environment, "PREFECT_API_URL": ""})
    run.start(on_terminal=True)
    run.wait_step(SAVE_INTERVAL + 3)
    run.press_ctrl_c()
    run.wait_event(StopRequested, lambda event: event.reason == "SIGINT")
    step = assert_stopped(run, run.wait_end())
    assert step % SAVE_INTERVAL != 0, "it stopped where it was, not at the next checkpoint"
    assert run.of(GroupEnded)[-1].cause == "stopped"
    assert run.of(Incident) == []

    run.start(on_terminal=True)
    ready = run.wait_event(GroupReady, lambda event: event.incarnation == 2)
    assert ready.restored_from.step == step
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference, abandoned=0)  # to the bit


@pytest.mark.slow
def test_an_interrupt_between_two_segments_loses_no_step(new_run: NewRun, reference: Run) -> None:
    """The group trains on while the flow goes from one segment to the next: it must be stopped and saved as well."""
    run = new_run()
    run.start()
    run.wait_event(SegmentEnded, lambda event: event.end_step == 3 * SAVE_INTERVAL)
    run.interrupt()
    step = assert_stopped(run, run.wait_end())
    assert step >= 3 * SAVE_INTERVAL
    run.start()
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference, abandoned=0)


@pytest.mark.slow
def test_an_interrupt_of_the_process_alone_stops_as_well(new_run: NewRun) -> None:
    run = new_run()
    run.start()
    run.wait_step(SAVE_INTERVAL + 3)
    run.interrupt()
    assert assert_stopped(run, run.wait_end()) > SAVE_INTERVAL


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(new_run: NewRun) -> None:
    """The steps are so slow that stopping at a boundary takes seconds."""
    run = new_run(env={"SHOAL_TEST_ROW_SECONDS": "0.6"})
    run.start()
    run.wait_step(2)
    run.interrupt()
    run.wait_event(StopRequested)
    run.interrupt()
    asked = time.monotonic()
    code = run.wait_end(timeout=20.0)
    print(f"ended {time.monotonic() - asked:.1f} s after the second interrupt")
    assert_stopped(run, code)
    assert "at once" in run.output
    assert run.of(CheckpointCommitted) == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["hosts", "import", "devices", "trace"])
def test_an_interrupt_while_workers_start_ends_the_run_at_once(phase: str, new_run: NewRun) -> None:
    run = new_run()
    run.start()
    if phase == "hosts":
        run.wait_event(HostChanged)
    else:
        run.wait_event(WorkerPhase, lambda event: event.phase == phase)
    run.interrupt()
    asked = time.monotonic()
    code = run.wait_end(timeout=20.0)
    print(f"ended {time.monotonic() - asked:.1f} s after the interrupt")
    assert assert_stopped(run, code) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, 3.5, 6.0])
def test_an_interrupt_before_training_leaves_nothing(
    seconds: float, new_run: NewRun, embedded_environment: dict[str, str]
) -> None:
    """On a terminal, with an embedded server: while modules are imported, the job is described, prefect starts."""
    run = new_run(env={**embedded_environment, "PREFECT_API_URL": ""})
    run.start(on_terminal=True)
    assert run.process is not None
    time.sleep(seconds)  # there is no event to wait for: nothing has been written yet
    run.press_ctrl_c()
    code = run.wait_end(timeout=30.0)
    run.assert_nothing_left(within=1.0)
    assert code == STOPPED, f"{code}\n{run.output}"
    assert "Traceback" not in run.output, run.output


@pytest.mark.slow
def test_a_run_can_be_stopped_while_it_recovers_and_while_it_waits(new_run: NewRun, reference: Run) -> None:
    run = new_run(**{"num_hosts.min": 4, "engine.replacement_delay_seconds": -1.0})
    run.start()
    run.wait_step(SAVE_INTERVAL + 3)
    run.kill_host("host-3")
    run.wait_event(Incident)
    run.interrupt()  # waiting for a host that never comes
    assert assert_stopped(run, run.wait_end(timeout=20.0)) == SAVE_INTERVAL

    events = len(run.events)
    run.start()
    run.wait_step(SAVE_INTERVAL + 12, since=len(run.trained))
    run.kill_worker("host-1")
    run.wait_event(Incident, since=events)
    run.wait_event(WorkerPhase, lambda event: event.incarnation == 3, since=events)
    run.interrupt()  # while the next group starts
    assert assert_stopped(run, run.wait_end(timeout=20.0)) == 2 * SAVE_INTERVAL

    run.start()
    assert_complete(run, run.wait_end())
    assert len(run.of(RunOpened)) == 3
    assert_same_training(run, reference)
