"""`shoal rollback` of a real run, and what training makes of it afterwards."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import CommandLine, plain_environment
from tests.cli.conftest import FinishedRun
from tests.cli.test_refusals import REFUSED, assert_refused_by_looking, listing
from trainer.history import RunHistory
from trainer.store import LocalStore


@pytest.fixture
def moved(finished_run: FinishedRun, shoal: CommandLine) -> Path:
    """A copy of the finished run (steps 3, 6 and 7 are committed), where `shoal` would continue it."""
    directory = shoal.folder / "storage" / "first"
    shutil.copytree(finished_run.directory, directory)
    return directory


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--to-step", "5", "--yes"], ["cannot be rolled back to step 5", "committed steps: 3, 6, 7"]),
        (["--to-step", "3"], ["no terminal to ask on, and nothing was done", "--yes"]),
    ],
)
def test_what_cannot_be_or_is_not_confirmed_changes_nothing(
    moved: Path, shoal: CommandLine, arguments: list[str], parts: list[str]
) -> None:
    before = listing(moved)
    assert_refused_by_looking(shoal("rollback", "storage/first", *arguments), REFUSED, *parts)
    assert listing(moved) == before


def test_on_a_terminal_it_asks_first(moved: Path, shoal: CommandLine) -> None:
    def answer(word: str) -> subprocess.CompletedProcess[str]:
        ours, theirs = pty.openpty()
        try:
            os.write(ours, f"{word}\n".encode())
            return subprocess.run(
                [*shoal.command, "rollback", "storage/first", "--to-step", "6", "--json"],
                cwd=shoal.folder,
                env=plain_environment(),
                stdin=theirs,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.close(ours)
            os.close(theirs)

    before = listing(moved)
    refused = answer("no")
    assert (refused.returncode, refused.stdout) == (REFUSED, "")
    assert "shoal: not confirmed; nothing was done" in refused.stderr
    assert listing(moved) == before
    done = answer("yes")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rolled_back"] is True
    assert RunHistory.load(LocalStore(moved)).step == 6


def test_what_is_no_run_is_refused(shoal: CommandLine) -> None:
    assert_refused_by_looking(shoal("rollback", ".", "--to-step", "1"), REFUSED, "is not a run directory")


def test_a_dry_run_and_the_newest_step_change_nothing(moved: Path, shoal: CommandLine) -> None:
    before = listing(moved)
    dry = shoal("rollback", "storage/first", "--to-step", "3", "--dry-run", "--json")
    assert (dry.exit_code, dry.stderr) == (0, "")
    assert json.loads(dry.stdout) == {
        "rolled_back": False,
        "to_step": 3,
        "from_step": 7,
        "checkpoint": "checkpoints/1/3",
        "abandoned_steps": 4,
        "abandoned_checkpoints": ["checkpoints/1/7", "checkpoints/1/6"],
    }
    newest = shoal("rollback", "storage/first", "--to-step", "7", "--yes")
    assert (newest.exit_code, newest.stderr) == (0, "")
    assert "step 7 is the newest committed step already" in newest.stdout
    assert listing(moved) == before


@pytest.mark.slow
def test_a_complete_run_that_is_rolled_back_is_trained_again_to_the_same_end(moved: Path, shoal: CommandLine) -> None:
    before = RunHistory.load(LocalStore(moved))
    abandoned = {path: (moved / path).read_bytes() for path in listing(moved) if (moved / path).is_file()}
    rolled = shoal("rollback", "storage/first", "--to-step", "3", "--reason", "[bold] try again", "--yes")
    assert (rolled.exit_code, rolled.stderr) == (0, "")
    assert "abandons the finished steps after it (4) and checkpoints/1/6, checkpoints/1/7" in rolled.stdout

    status = json.loads(shoal("status", "storage/first", "--json").stdout)
    assert (status["state"], status["step"], status["committed_step"]) == ("stopped", 3, 3)
    assert status["message"] == "rolled back from step 7 to step 3: [bold] try again"
    assert "[bold] try again" in shoal("status", "storage/first").stdout

    trained = shoal("train", "config.yaml")
    assert trained.exit_code == 0, trained.stderr
    assert "run continues: newest commit at step 3" in trained.stdout
    after = RunHistory.load(LocalStore(moved))
    assert [step.incarnation for step in after.steps] == [1] * 3 + [2] * 4
    assert [(m.loss, m.sample_digest) for m in after.metrics] == [(m.loss, m.sample_digest) for m in before.metrics]
    assert [(commit.step, commit.incarnation) for commit in after.commits] == [(3, 1), (6, 2), (7, 2)]
    assert after.state == "complete"
    assert after.problems == ()
    kept = [path for path in abandoned if path.startswith(("checkpoints/", "commits/", "metrics/"))]
    assert all((moved / path).read_bytes() == abandoned[path] for path in kept)
    assert "It was rolled back from step 7 to step 3" in (moved / "report" / "report.md").read_text()
