"""`shoal evaluate` of a real run of 7 steps, whose steps 3, 6 and 7 are committed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.command import CommandLine
from tests.cli.conftest import TEXT, FinishedRun
from tests.cli.test_refusals import REFUSED, assert_refused, assert_refused_by_looking, listing
from trainer.errors import DataError, StorageError
from trainer.evaluation import EvaluationRequest, evaluation_steps, measure
from trainer.history import RunHistory
from trainer.store import LocalStore

SAMPLES = (len(TEXT) - 1) // 16  # of the run's data
BATCH = 4


def evaluated(shoal: CommandLine, *arguments: str) -> dict[str, Any]:
    finished = shoal("evaluate", "storage/first", "--json", *arguments)
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert finished.left_behind == ()
    return dict(json.loads(finished.stdout))


def test_the_newest_checkpoint_is_evaluated_on_samples_that_the_run_never_trains_on(finished_run: FinishedRun) -> None:
    before = listing(finished_run.directory)
    result = evaluated(finished_run.shoal)
    last = RunHistory.load(LocalStore(finished_run.directory)).metrics[-1]
    assert abs(result["loss"] - last.loss) < 1.0  # of the state before its last step, and falling fast
    assert result["perplexity"] == pytest.approx(2.718281828459045 ** result["loss"])
    assert {name: result[name] for name in ("run_name", "step", "checkpoint", "samples", "tokens", "held_out")} == {
        "run_name": "first",
        "step": 7,
        "checkpoint": "checkpoints/1/7",
        "samples": 16 * BATCH,
        "tokens": 16 * BATCH * 16,
        "held_out": True,
    }
    assert evaluated(finished_run.shoal) == result, "the same question has the same answer"
    assert listing(finished_run.directory) == before

    said = finished_run.shoal("evaluate", "storage/first", "--step", "3", "--batches", "1000")
    assert (said.exit_code, said.stderr) == (0, "")
    # No more than the rest of the data: one sample is no whole batch.
    unseen = (SAMPLES // BATCH - 7) * BATCH
    assert f"on {unseen} samples that the run does not train on: data.path 'text.txt'" in said.stdout
    assert said.stdout.startswith("step 3 (checkpoints/1/3): loss ")


@pytest.mark.slow
def test_on_a_batch_that_was_trained_on_it_is_the_loss_that_training_had_there(
    finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of step 4 is that of the state after step 3 on the samples of step 4."""
    monkeypatch.chdir(finished_run.shoal.folder)
    history = RunHistory.load(LocalStore(finished_run.directory))
    assert history.run is not None
    for step in (3, 6):
        request = EvaluationRequest(
            config=history.run.config,
            checkpoint=str(finished_run.directory / "checkpoints" / "1" / str(step)),
            own_data_hash=history.run.data.content_hash,
            trained_steps=step,
            batches=1,
        )
        assert measure(request).loss == pytest.approx(history.metrics[step].loss, rel=1e-5)


@pytest.mark.slow
def test_other_data_are_evaluated_without_a_claim_about_them(finished_run: FinishedRun, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 20)  # 12 samples, nothing like the run's
    result = evaluated(finished_run.shoal, "--data", str(other), "--batches", "2")
    assert (result["samples"], result["held_out"]) == (8, None)
    assert result["loss"] > evaluated(finished_run.shoal)["loss"]


@given(
    num_samples=st.integers(1, 200),
    batch=st.integers(1, 20),
    trained=st.integers(0, 40),
    batches=st.integers(1, 30),
)
def test_samples_are_called_held_out_only_if_no_trained_step_has_them(
    num_samples: int, batch: int, trained: int, batches: int
) -> None:
    steps, held_out = evaluation_steps(
        num_samples=num_samples, global_batch_size=batch, trained_steps=trained, batches=batches
    )
    assert 1 <= len(steps) <= batches
    assert steps.start == trained + 1
    # The first epoch holds each sample once: positions below its end are all different.
    in_first_epoch = (steps.stop - 1) * batch <= num_samples
    assert held_out == in_first_epoch


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_an_unknown_step_is_refused_by_looking(finished_run: FinishedRun) -> None:
    finished = finished_run.shoal("evaluate", "storage/first", "--step", "5")
    assert_refused_by_looking(finished, REFUSED, "no checkpoint of step 5; committed steps: 3, 6, 7")


def test_a_run_without_a_commit_is_refused_by_looking(finished_run: FinishedRun, shoal: CommandLine) -> None:
    young = shoal.folder / "young"
    young.mkdir()
    shutil.copy(finished_run.directory / "run.json", young)
    assert_refused_by_looking(shoal("evaluate", "young"), REFUSED, "has no committed step yet")


@pytest.mark.parametrize(
    ("text", "part"), [(None, "No such file"), ("short", "one sample needs 17"), ("x" * 40, "one batch needs 4")]
)
def test_data_that_will_not_do_are_a_data_error(
    finished_run: FinishedRun, tmp_path: Path, text: str | None, part: str
) -> None:
    other = tmp_path / "other.txt"
    if text is not None:
        other.write_text(text)
    finished = finished_run.shoal("evaluate", "storage/first", "--data", str(other))
    assert_refused(finished, DataError.exit_code, part)


def test_own_data_that_have_changed_are_not_called_held_out(finished_run: FinishedRun, shoal: CommandLine) -> None:
    shutil.copytree(finished_run.directory, shoal.folder / "storage" / "first")
    (shoal.folder / "text.txt").write_text(TEXT.upper())
    assert_refused(
        shoal("evaluate", "storage/first"), DataError.exit_code, "no longer those that the run was begun with"
    )


def test_a_damaged_checkpoint_is_passed_over_unless_it_is_asked_for(
    finished_run: FinishedRun, shoal: CommandLine
) -> None:
    moved = shoal.folder / "storage" / "first"
    shutil.copytree(finished_run.directory, moved)
    (moved / "checkpoints" / "1" / "7" / "_METADATA").write_bytes(b"")
    before = listing(moved)
    assert evaluated(shoal)["step"] == 6
    finished = shoal("evaluate", "storage/first", "--step", "7")
    assert_refused_by_looking(finished, StorageError.exit_code, "checkpoints/1/7: _METADATA has 0 bytes")
    assert listing(moved) == before, "nothing is set aside by looking"
