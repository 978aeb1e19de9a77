"""The terminal of a run may go away or be unable to spell; the run does not depend on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import IO

import pytest

from deployments.cli import Terminal
from deployments.progress import ProgressDisplay
from trainer.records import StopRequested


@pytest.fixture(params=["its reader has gone", "its disk is full"])
def dead_end(request: pytest.FixtureRequest) -> Iterator[IO[str]]:
    if request.param == "its disk is full":
        path = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, path = os.pipe()
        os.close(reader)
    file = os.fdopen(path, "w")
    yield file
    with contextlib.suppress(OSError):  # what it could not write, it cannot write now
        file.close()


def test_a_terminal_that_fails_silences_the_display_and_nothing_else(dead_end: IO[str]) -> None:
    terminal = Terminal(file=dead_end)
    event = StopRequested(time=0.0, monotonic=0.0, incarnation=1, reason="a test")
    with ProgressDisplay(terminal, steps=10) as display:
        display(event)
        assert terminal.quiet
        display(event)


def test_a_terminal_that_works_shows_the_event(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(Terminal(), steps=10) as display:
        display(StopRequested(time=0.0, monotonic=0.0, incarnation=1, reason="a test"))
    assert "stopping at the next step boundary (a test)" in capsys.readouterr().out


def test_warnings_of_a_run_are_lines_and_everything_below_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("shoal")
    with ProgressDisplay(Terminal(), steps=10):
        log.warning("metrics.port %d is taken", 9100)
        log.info("nobody asked for this")
    log.warning("after the end")
    shown = capsys.readouterr().out
    assert "metrics.port 9100 is taken" in shown
    assert len(shown.splitlines()) == 1
