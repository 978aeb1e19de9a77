"""Evaluating a run: which checkpoint, on which samples. Reads only, takes no lease, and minds no controller."""

from __future__ import annotations

from pathlib import Path

from trainer.config import DataConfig, MetricsConfig, RunConfig
from trainer.control.catalog import Catalog
from trainer.control.run import check_is_run, read_run
from trainer.errors import RefusedError, StorageError
from trainer.evaluation import Evaluation, EvaluationRequest, measure, perplexity_of
from trainer.history import RunHistory
from trainer.records import CommitRecord, RunRecord
from trainer.store import LocalStore

# How often a checkpoint may be deleted by the run's retention while it is being read, before that is an error.
_MOST_TRIES = 3


def evaluated_run(store: LocalStore, data_path: str | None) -> tuple[RunRecord, RunConfig]:
    """run.json, and the configuration to evaluate with: what a service checks.

    Raises:
        RefusedError: there is no run.
        StorageError: it cannot be read.
    """
    check_is_run(store)
    record = read_run(store)
    assert record is not None
    config = record.config.model_copy(update={"storage": str(Path(store.location).parent), "metrics": MetricsConfig()})
    if data_path is not None:
        config = config.model_copy(update={"data": DataConfig(path=data_path)})
    return record, config


def evaluate_run(store: LocalStore, *, step: int | None, batches: int, data_path: str | None) -> Evaluation:
    """The loss of a committed checkpoint; its files are verified first.

    Args:
        step: a committed step of the current line of history; None: the newest good one.
        batches: of `global_batch_size` samples each, if there are so many.
        data_path: as `data.path`; None: the run's own data from beyond its last step.

    Raises:
        RefusedError: no run, or no such step; those that there are are listed.
        StorageError: the checkpoint is damaged or cannot be restored.
        DataError, UserCodeError, ConfigError: as `trainer.evaluation.measure`.
    """
    record, config = evaluated_run(store, data_path)
    history = RunHistory.load(store)
    trained = [taken.step for taken in (*history.steps, *history.abandoned)]
    for _ in range(_MOST_TRIES):
        commit = choose(store, step)
        request = EvaluationRequest(
            config=config,
            checkpoint=f"{store.location}/{commit.path}",
            own_data_hash=record.data.content_hash if data_path is None else None,
            trained_steps=max([history.total_steps or 0, *trained]),
            batches=batches,
        )
        try:
            measured = measure(request)
        except StorageError:
            if commit in Catalog(store).commits():
                raise
            continue
        return Evaluation(
            run_name=config.run_name,
            step=commit.step,
            incarnation=commit.incarnation,
            checkpoint=commit.path,
            loss=measured.loss,
            perplexity=perplexity_of(measured.loss) if config.job == "lm" else None,
            samples=measured.samples,
            tokens=measured.tokens,
            data=measured.data,
            held_out=measured.held_out,
        )
    raise StorageError(
        f"{store.location}: {_MOST_TRIES} checkpoints were deleted while they were being read; try again"
    )


def choose(store: LocalStore, step: int | None) -> CommitRecord:
    """The checkpoint of a step, or the newest one that is what its record says. Sets nothing aside.

    Raises:
        RefusedError, StorageError: as `evaluate_run`.
    """
    catalog = Catalog(store)
    commits = catalog.commits()
    if not commits:
        raise RefusedError(f"{store.location} has no committed step yet")
    candidates = [commit for commit in commits if step is None or commit.step == step]
    if not candidates:
        listed = ", ".join(str(commit.step) for commit in reversed(commits))
        raise RefusedError(f"{store.location} has no checkpoint of step {step}; committed steps: {listed}")
    problems = []
    for commit in candidates:
        problem = catalog.problem(commit)
        if problem is None:
            return commit
        problems.append(f"{commit.path}: {problem}")
    raise StorageError(f"{store.location} has no good checkpoint to evaluate ({'; '.join(problems)})")
