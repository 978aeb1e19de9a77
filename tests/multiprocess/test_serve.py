"""`shoal serve`: real servers, runners and flow processes, and what becomes of runs when these end."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable

import pytest

from tests.multiprocess.harness import STEPS, Run, assert_same_training, describe, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer.history import RunHistory
from trainer.records import CheckpointCommitted, RunEnded, RunOpened
from trainer.store import LocalStore

pytestmark = pytest.mark.slow


def assert_complete(run: Run) -> None:
    run.assert_nothing_left()
    (*_, ended) = run.of(RunEnded)
    assert (ended.outcome, ended.step) == ("complete", STEPS), run.story()


def test_a_killed_flow_process_is_continued_and_a_cancelled_run_can_be_retried(
    new_run: Callable[..., Run], new_service: Callable[..., Service], reference: Run
) -> None:
    killed, cancelled = new_run("killed"), new_run("cancelled", run_name="cancelled")
    service = new_service({"killed": killed, "cancelled": cancelled})
    service.start(killed.cwd)

    # What the service does not list is refused before any work.
    elsewhere = {"config": killed.config | {"storage": str(killed.cwd / "elsewhere")}}
    refused = service.submit("train", elsewhere)
    assert "allow.storage_roots" in service.wait_state(refused, "Failed")["state"]["message"]
    assert not (killed.cwd / "elsewhere").exists()

    # The flow process dies: Crashed, scheduled again, continued from its newest commit, by one process at a time.
    flow_run = service.submit("killed")
    killed.wait_event(CheckpointCommitted, timeout=PATIENCE_SECONDS)
    process = service.flow_process()
    assert process is not None
    process.kill()
    service.wait_state(flow_run, "Completed")
    assert {"Crashed", "Scheduled"} <= set(service.state_names(flow_run))
    assert_complete(killed)
    assert_same_training(killed, reference)
    second = killed.of(RunOpened)[1]
    assert second.resumed
    assert second.newest_commit is not None

    # Cancel in the UI stops at a step boundary and saves; Retry goes on from there and trains no step again.
    flow_run = service.submit("cancelled")
    cancelled.wait_step(3, timeout=PATIENCE_SECONDS)
    service.set_state(flow_run, "CANCELLING", "Cancelling")
    service.wait_state(flow_run, "Cancelled")
    wait_until(lambda: service.flow_process() is None, PATIENCE_SECONDS, lambda: "the flow process ends")
    cancelled.assert_nothing_left()
    stopped = cancelled.of(RunEnded)[-1]
    assert stopped.outcome == "stopped"
    assert 3 <= stopped.step < STEPS
    service.set_state(flow_run, "SCHEDULED", "AwaitingRetry")
    service.wait_state(flow_run, "Completed")
    assert_complete(cancelled)
    assert_same_training(cancelled, reference, abandoned=0)

    assert service.stop() == 0
    assert service.processes() == []


def test_a_service_that_ends_saves_its_runs_and_the_next_one_continues_them(
    new_run: Callable[..., Run], new_service: Callable[..., Service], reference: Run
) -> None:
    run = new_run()
    service = new_service({"one": run})
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.5")  # two seconds a step: it outlasts the restarts below
    flow_run = service.submit("one")

    # The server and the runner die: they are started again, and the run does not notice.
    run.wait_step(3, timeout=PATIENCE_SECONDS)
    (server,) = service.processes("prefect", "server", "start")
    (runner,) = service.processes("deployments.runner")
    server.kill()
    runner.kill()
    wait_until(
        lambda: service.output.count("serving train/train") == 2, PATIENCE_SECONDS, lambda: f"again: {service.output}"
    )
    assert service.flow_process() is not None
    assert len(run.of(RunOpened)) == 1

    # The service is told to end: the run stops at a step boundary and saves, and is not cancelled.
    assert service.stop() == 0
    assert service.processes() == []
    run.assert_nothing_left()
    stopped = run.of(RunEnded)[-1]
    assert stopped.outcome == "stopped"
    assert stopped.step < STEPS

    service.start(run.cwd)
    service.wait_state(flow_run, "Completed")
    assert "Cancelled" not in service.state_names(flow_run)
    assert_complete(run)
    assert_same_training(run, reference, abandoned=0)

    # Killed outright, it takes the runner and the server with it. (A flow process that has something to report would
    # go on, and wait for the next server.)
    wait_until(lambda: service.flow_process() is None, PATIENCE_SECONDS, lambda: "the flow process ends")
    assert service.process is not None
    service.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not service.processes(), 30.0, lambda: describe(service.processes()))


def test_a_schedule_faster_than_its_run_skips_starts_and_doubles_none(
    new_run: Callable[..., Run], new_service: Callable[..., Service]
) -> None:
    run = new_run(steps=10, **{"num_hosts.max": 1})
    schedule = {"interval_seconds": 10, "timezone": "UTC", "own_run_each_time": True}
    service = new_service({"often": run}, schedules={"often": {"schedule": schedule}})
    service.start(run.cwd)

    def states() -> Counter[str]:
        service.flow_process()  # fails if there is more than one
        found = service.call("POST", "/flow_runs/filter", {"limit": 200})
        return Counter(flow_run["state"]["name"] for flow_run in found)

    wait_until(
        lambda: states()["Completed"] >= 3 and states()["Cancelled"] >= 1,
        2 * PATIENCE_SECONDS,
        lambda: f"three complete and one skipped: {states()} {service.output}",
    )
    assert service.stop() == 0
    runs = sorted(path.name for path in run.directory.parent.iterdir())
    assert all(re.fullmatch(r"run-\d{8}T\d{6}Z", name) for name in runs), runs
    complete = [name for name in runs if RunHistory.load(LocalStore(run.directory.parent / name)).state == "complete"]
    assert len(complete) >= 3
