"""The flow process itself dies, is doubled, or is started once more when there is nothing left to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.multiprocess.harness import (
    SAVE_INTERVAL,
    Run,
    assert_complete,
    assert_same_training,
    describe,
    listing,
    wait_until,
)
from trainer.control.lease import read_lease
from trainer.records import CheckpointCommitted, GroupReady, GroupStarting, RunOpened, WorkerPhase
from trainer.store import LocalStore

NewRun = Callable[..., Run]
CONTACT_TIMEOUT_SECONDS = 3.0  # as in the harness's base configuration


@pytest.mark.slow
def test_a_killed_flow_process_is_replaced_at_once_and_a_second_one_is_refused(new_run: NewRun, reference: Run) -> None:
    """One run through three processes of `shoal train`: killed, refused while its successor lives, finished already."""
    run = new_run(env={"SHOAL_TEST_ROW_SECONDS": "0.03"})  # slow enough for the second one to come in time
    run.start()
    run.wait_event(CheckpointCommitted)
    run.wait_step(SAVE_INTERVAL + 5)
    run.kill_flow()
    newest = max(event.step for event in run.of(CheckpointCommitted))
    orphans = run.processes()
    assert len(orphans) >= 4, "the agents live on for a moment; otherwise this test proves nothing"

    events = len(run.events)
    run.start()
    opened = run.wait_event(RunOpened, since=events)
    assert opened.resumed
    assert opened.newest_commit == newest
    second = run.train_again()
    assert second.returncode == 6, second.stdout + second.stderr
    lease = read_lease(LocalStore(run.directory))
    assert lease is not None
    assert str(lease.holder) in second.stderr
    assert str(lease.process.pid) in second.stderr

    ready = run.wait_event(GroupReady, since=events)
    assert (ready.restored_from.tier, ready.restored_from.step, ready.restored_from.incarnation) == (
        "checkpoint",
        newest,
        1,
    )
    assert ready.incarnation > 1
    assert not any(process.is_running() for process in orphans), describe(orphans)
    assert_complete(run, run.wait_end())
    history = assert_same_training(run, reference)
    assert all(step.step > newest for step in history.abandoned)

    before = listing(run.directory)
    done = run.shoal("train", str(run.config_path))
    assert done.returncode == 0, done.stderr
    assert "complete at step 60" in done.stdout
    assert listing(run.directory) == before
    imports = run.imported_by("train", str(run.config_path))
    assert not {"jax", "prefect"} & imports
    assert listing(run.directory) == before
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["training", "starting"])
def test_nothing_survives_a_killed_flow_process_beyond_the_contact_timeout(
    moment: str, new_run: NewRun, embedded_environment: dict[str, str], reference: Run
) -> None:
    """With a Prefect server of its own, so that this too is seen to end."""
    run = new_run(env={**embedded_environment, "PREFECT_API_URL": ""})
    run.start()
    if moment == "training":
        run.wait_step(15)
    else:
        run.wait_event(WorkerPhase, lambda event: event.phase == "devices")
    assert any("prefect" in " ".join(process.cmdline()) for process in run.processes())
    run.kill_flow()
    killed = time.monotonic()
    wait_until(lambda: not run.processes(), 5 * CONTACT_TIMEOUT_SECONDS, lambda: describe(run.processes()))
    print(f"nothing left after {time.monotonic() - killed:.1f} s")

    # Whatever lay in memory is swept by whoever comes next.
    run.start()
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference)


@pytest.mark.slow
def test_a_flow_process_that_dies_again_and_again_still_arrives(new_run: NewRun, reference: Run) -> None:
    """Killed while it opens the run, while workers start, while they train: each time the next one goes on."""
    run = new_run()
    run.start()
    run.wait_event(RunOpened)
    run.kill_flow()
    for phase in ("assignment", "trace"):
        events = len(run.events)
        run.start()
        run.wait_event(WorkerPhase, lambda event, phase=phase: event.phase == phase, since=events)
        run.kill_flow()
    run.start()
    run.wait_event(CheckpointCommitted)  # a fourth death in a row without one would spend the failure budget
    run.kill_flow()
    run.start()
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference)
    incarnations = [event.incarnation for event in run.of(GroupStarting)]
    assert incarnations == sorted(set(incarnations)), "no incarnation number is ever used twice"


@pytest.mark.slow
def test_a_stopped_flow_process_loses_its_run_to_no_one_who_asks_too_early(new_run: NewRun, reference: Run) -> None:
    """SIGSTOP: the process lives but does nothing. Its agents fence themselves; a second controller is refused, for on
    the same machine it can see that the first one lives. Continued, the first one goes on."""
    run = new_run()
    run.start()
    run.wait_step(15)
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGSTOP)
    try:
        agents = [process for process in run.processes() if "host_agent" in " ".join(process.cmdline())]
        wait_until(
            lambda: not any(agent.is_running() for agent in agents if agent.status() != "zombie"),
            5 * CONTACT_TIMEOUT_SECONDS,
            lambda: describe(agents),
        )
        second = run.train_again()
        assert second.returncode == 6, second.stdout + second.stderr
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    assert_complete(run, run.wait_end())
    assert_same_training(run, reference)
