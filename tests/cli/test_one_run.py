"""A real run on 1 host, from its first step to its going on with other settings, as its owner sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import CommandLine
from tests.cli.conftest import TEXT, FinishedRun
from tests.cli.test_refusals import REFUSED, assert_refused, assert_refused_by_looking, listing
from trainer.errors import DataError


def committed_steps(run: Path) -> list[int]:
    return sorted(int(path.name.split(".")[0]) for path in (run / "commits").glob("*.json"))


def test_steps_need_not_be_a_multiple_of_the_save_interval_and_the_last_step_is_saved(
    finished_run: FinishedRun,
) -> None:
    assert finished_run.trained.exit_code == 0, finished_run.trained.stderr
    assert committed_steps(finished_run.directory) == [3, 6, 7]


def test_a_run_keeps_stderr_clean_and_leaves_no_process_behind(finished_run: FinishedRun) -> None:
    assert finished_run.trained.stderr == ""
    assert finished_run.trained.left_behind == ()
    assert finished_run.trained.num_processes >= 5  # command, description, Prefect server, agent, worker
    assert f"run first in {finished_run.directory}" in finished_run.trained.stdout


def test_a_complete_run_is_not_trained_again_and_costs_no_start(finished_run: FinishedRun) -> None:
    again = finished_run.shoal("train", "config.yaml")
    assert (again.exit_code, again.stderr) == (0, "")
    assert "run first is complete at step 7; nothing to do" in again.stdout
    assert (again.num_processes, again.heavy) == (1, frozenset())


@pytest.mark.parametrize("command", ["plan", "status", "hosts", "doctor"])
def test_json_is_one_document_on_stdout_and_nothing_else(finished_run: FinishedRun, command: str) -> None:
    subject = {"plan": ["config.yaml"], "doctor": []}.get(command, ["storage/first"])
    finished = finished_run.shoal(command, *subject, "--json")
    assert (finished.exit_code, finished.stderr) == (0, "")
    document = json.loads(finished.stdout)
    match command:
        case "plan":
            assert document["hosts"] == ["host-0"]
        case "status":
            assert (document["state"], document["step"], document["committed_step"]) == ("complete", 7, 7)
            assert document["location"] == str(finished_run.directory)
        case "hosts":
            assert document == []  # nobody trains it any more
        case "doctor":
            assert {finding["ok"] for finding in document} == {True}
    assert finished.left_behind == ()


def test_a_plan_that_is_refused_is_one_json_document_too(finished_run: FinishedRun) -> None:
    finished = finished_run.shoal("plan", "config.yaml", "--json", "--set", "engine.device_memory_bytes=1000")
    assert (finished.exit_code, finished.stderr) == (REFUSED, "")
    assert "does not fit" in json.loads(finished.stdout)["refused"]["reason"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_status_is_shown_whatever_the_terminal_can_spell(finished_run: FinishedRun, encoding: str) -> None:
    finished = finished_run.shoal("status", "storage/first", environment={"PYTHONIOENCODING": encoding})
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert "7 of 7" in finished.stdout
    assert "my runs [/bold]" in finished.stdout


def test_the_report_can_be_written_again_from_the_directory_alone(finished_run: FinishedRun) -> None:
    report = finished_run.directory / "report" / "report.md"
    report.unlink()
    finished = finished_run.shoal("report", "storage/first")
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert "report/report.md" in finished.stdout
    assert report.exists()
    assert finished.heavy == frozenset()


def test_the_pool_of_a_run_that_nobody_trains_cannot_be_changed(finished_run: FinishedRun) -> None:
    assert_refused_by_looking(
        finished_run.shoal("capacity", "storage/first", "--hosts", "2"), REFUSED, "nobody trains this run"
    )


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "both_values"),
    [
        ("seed=3", "seed: 0 -> 3"),
        ("global_batch_size=8", "global_batch_size: 4 -> 8"),
        ("job_params.seq_len=8", "job_params.seq_len: 16 -> 8"),
        ("job=examples.quadratic:LinearRegression", 'job: "lm" -> "examples.quadratic:LinearRegression"'),
        ("optimizer.b1=0.5", "optimizer.b1: 0.9 -> 0.5"),
    ],
)
def test_settings_that_are_fixed_for_the_life_of_a_run_are_refused_with_both_values(
    finished_run: FinishedRun, override: str, both_values: str
) -> None:
    finished = finished_run.shoal("train", "config.yaml", "--set", "steps=9", "--set", override)
    assert_refused_by_looking(finished, REFUSED, "'first' was made with other settings", both_values)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (TEXT.upper(), ["begun with other data", "'text.txt'", "'other.txt'"]),
        ("short", ["'other.txt'", "5 bytes", "one sample needs 17"]),
        (None, ["'other.txt'", "No such file"]),
    ],
    ids=["other", "too little", "none"],
)
def test_a_complete_run_is_not_called_complete_for_other_data(
    finished_run: FinishedRun, tmp_path: Path, text: str | None, parts: list[str]
) -> None:
    other = tmp_path / "other.txt"
    if text is not None:
        other.write_text(text)
    before = listing(finished_run.directory)
    finished = finished_run.shoal("train", "config.yaml", "--set", f"data.path={other}")
    assert_refused(finished, DataError.exit_code, *(part.replace("'other.txt'", repr(str(other))) for part in parts))
    assert finished.num_processes == 2  # the command and the description: no Prefect, no worker
    assert listing(finished_run.directory) == before


def test_a_complete_run_is_complete_for_the_same_data_at_another_path(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    finished = finished_run.shoal("train", "config.yaml", "--set", f"data.path={tmp_path / 'text.txt'}")
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert "run first is complete at step 7; nothing to do" in finished.stdout


def test_other_data_under_the_same_name_is_refused_with_both_descriptions(finished_run: FinishedRun) -> None:
    (finished_run.shoal.folder / "other.txt").write_text(TEXT.upper())
    finished = finished_run.shoal("train", "config.yaml", "--set", "steps=9", "--set", "data.path=other.txt")
    assert_refused(finished, DataError.exit_code, "begun with other data", "'text.txt'", "'other.txt'")
    assert committed_steps(finished_run.directory) == [3, 6, 7]


def test_a_run_goes_on_from_a_moved_directory_with_other_steps_hosts_and_interval(
    finished_run: FinishedRun, shoal: CommandLine
) -> None:
    moved = shoal.folder / "elsewhere" / "first"
    shutil.copytree(finished_run.directory, moved)
    overrides = ["storage=elsewhere", "steps=9", "num_hosts.max=2", "checkpoint.save_interval_steps=4"]
    finished = shoal("train", "config.yaml", *(argument for each in overrides for argument in ("--set", each)))
    assert finished.exit_code == 0, finished.stderr
    assert "on 2 hosts" in finished.stdout
    assert committed_steps(moved) == [3, 6, 7, 8, 9]
    assert finished.left_behind == ()
