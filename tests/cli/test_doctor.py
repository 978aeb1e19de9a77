"""`shoal doctor`: what a person runs first, and what a script asks before it submits."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import CommandLine
from trainer.errors import StorageError


def test_doctor_finds_this_machine_fit_and_creates_nothing(shoal: CommandLine) -> None:
    finished = shoal("doctor", "--storage", "storage")
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert {line.split()[0] for line in finished.stdout.splitlines()} == {"ok"}
    assert not (shoal.folder / "storage").exists()


@pytest.mark.parametrize(
    ("storage", "reason"), [("text.txt/runs", "is not a directory"), ("gs://bucket/runs", "only local paths")]
)
def test_doctor_fails_for_a_storage_that_cannot_be_used(shoal: CommandLine, storage: str, reason: str) -> None:
    finished = shoal("doctor", "--storage", storage)
    assert (finished.exit_code, finished.stderr) == (StorageError.exit_code, "")
    failed = [line for line in finished.stdout.splitlines() if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == ["FAIL storage"]
    assert reason in failed[0]


def test_doctor_names_what_is_missing_as_json(shoal: CommandLine) -> None:
    finished = shoal("doctor", "--storage", "/dev/null/runs", "--json")
    assert finished.exit_code == StorageError.exit_code
    assert [finding["name"] for finding in json.loads(finished.stdout) if not finding["ok"]] == ["storage"]
