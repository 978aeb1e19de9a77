"""The user's own mistakes end the run at once; workers that only die use up the budget first."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import Run
from trainer.records import CheckpointCommitted, GroupStarting, Incident, RunEnded

NewRun = Callable[..., Run]


def assert_user_error(run: Run, code: int, *quoted: str) -> None:
    """Exit code 3, one attempt, and the worker's own traceback on stderr."""
    assert code == 3, run.story()
    run.assert_nothing_left()
    for text in ("Traceback (most recent call last)", *quoted):
        assert text in run.output, run.output
    (incident,) = run.of(Incident)
    assert incident.cause == "user_error"
    assert len(run.of(GroupStarting)) == 1, "a mistake in the job is never retried"
    ended = run.of(RunEnded)[-1]
    assert (ended.outcome, ended.cause) == ("failed", "user_error")


@pytest.mark.slow
def test_an_error_while_loading_data_ends_the_run_with_its_traceback(new_run: NewRun, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    run = new_run(job="tiny_job:LateDataError", env={"SHOAL_TEST_FAULT": str(fault)})
    run.start()
    run.wait_event(CheckpointCommitted)
    run.wait_step(15)
    fault.touch()
    broken = time.monotonic()
    code = run.wait_end()
    print(f"ended after {time.monotonic() - broken:.1f} s")
    assert_user_error(run, code, "KeyError", "has no label", "tiny_job.py")
    assert run.of(Incident)[0].step >= 15
    newest = run.history().newest_commit
    assert newest is not None
    assert newest.step >= 10, "what was committed before stays"


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 2])
def test_an_error_while_tracing_on_any_one_process_ends_the_run_with_its_traceback(
    process: int, new_run: NewRun
) -> None:
    """The other processes do not fail, or fail later of something that only echoes it."""
    run = new_run(job="tiny_job:TracingError", env={"SHOAL_TEST_FAULT": str(process)})
    run.start()
    code = run.wait_end()
    assert_user_error(run, code, "ZeroDivisionError", "the learning rate was 0", "tiny_job.py")
    assert run.of(Incident)[0].host_ids == (f"host-{process}",)


@pytest.mark.slow
def test_workers_that_always_die_use_up_the_failure_budget(new_run: NewRun) -> None:
    run = new_run(**{"job": "tiny_job:Suicide", "elastic.max_failures": 2, "num_hosts.max": 2})
    run.start()
    assert run.wait_end() == 4, run.story()
    run.assert_nothing_left()
    assert [event.cause for event in run.of(Incident)] == ["worker_crashed"] * 3
    assert len(run.of(GroupStarting)) == 3, "elastic.max_failures + 1 attempts"
    ended = run.of(RunEnded)[-1]
    assert (ended.outcome, ended.step) == ("failed", 0)
    assert "elastic.max_failures" in run.output
