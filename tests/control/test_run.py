"""What counts as a complete run, of which nothing is left to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.run_directory_builder import RunDirectoryBuilder
from trainer.config import RunConfig, parse_config
from trainer.control.lease import Lease
from trainer.control.run import completed_step
from trainer.report import build_report, report_is_current

STEPS = 20


@pytest.fixture
def run(tmp_path: Path) -> RunDirectoryBuilder:
    """Its last step is committed, and its process is gone before it could say that the run is over."""
    run = RunDirectoryBuilder(tmp_path / "quickstart", steps=STEPS, optimizer={"decay_steps": STEPS})
    run.open()
    run.start_group(1)
    run.train(STEPS)
    run.checkpoint()
    run.write_lease(holder=None)
    return run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config({"run_name": "quickstart", "storage": str(tmp_path), "steps": STEPS})


def test_a_run_is_complete_only_if_it_was_ended_or_somebody_is_about_to(
    run: RunDirectoryBuilder, config: RunConfig
) -> None:
    assert completed_step(config) is None
    holder = Lease(run.store, f"test-{os.getpid()}")
    holder.acquire(wait_seconds=0.0)
    assert completed_step(config) == STEPS
    holder.release()
    assert completed_step(config) is None
    run.end("complete", cause="completed")
    assert completed_step(config) == STEPS


def test_a_report_is_current_until_the_run_goes_on(run: RunDirectoryBuilder) -> None:
    assert not report_is_current(run.store)
    build_report(run.store)
    assert report_is_current(run.store)
    run.end("complete", cause="completed")
    assert not report_is_current(run.store)
    build_report(run.store)
    assert report_is_current(run.store)
