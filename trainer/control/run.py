"""Opening a run: everything that can refuse it before a process is started or a byte of training is spent."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pydantic

from trainer.config import RunConfig, differing_keys
from trainer.control.catalog import Catalog
from trainer.control.lease import is_held
from trainer.control.providers import check_provider
from trainer.description import JobDescription, describe_job
from trainer.errors import DataError, PlanError, RefusedError, RunMismatchError, StorageError
from trainer.history import RunHistory
from trainer.planning.topology import check_minimum
from trainer.records import SCHEMA_VERSION, RunRecord, to_json
from trainer.store import LocalStore, run_store

RUN_KEY = "run.json"


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run directory that accepts this configuration."""

    store: LocalStore
    config: RunConfig
    """With what is fixed for the life of the run filled in from `run.json`."""
    record: RunRecord
    resumed: bool


def check_is_run(store: LocalStore) -> None:
    """Raises RefusedError if there is no run in this directory."""
    if store.read(RUN_KEY) is None:
        raise RefusedError(
            f"{store.location} is not a run directory: it holds no {RUN_KEY} (a run that was just started needs some "
            "seconds to write it)"
        )


def read_run(store: LocalStore) -> RunRecord | None:
    """run.json, or None if there is no run yet.

    Raises:
        StorageError: it is there but cannot be understood.
    """
    data = store.read(RUN_KEY)
    if data is None:
        return None
    try:
        record = RunRecord.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise StorageError(f"{store.location}/{RUN_KEY} cannot be read: {error.errors()[0]['msg']}") from error
    if record.schema_version > SCHEMA_VERSION:
        raise StorageError(
            f"{store.location} was written by a newer version (schema {record.schema_version}, "
            f"this one reads up to {SCHEMA_VERSION})"
        )
    return record


def settle_config(config: RunConfig, record: RunRecord | None) -> RunConfig:
    """Fill in what the run fixed when it was created, and refuse what contradicts it.

    Raises:
        RunMismatchError: fixed settings differ; each is named with both values.
    """
    created = record.config if record is not None else config
    decay_steps = config.optimizer.decay_steps or created.optimizer.decay_steps or created.steps
    settled = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"decay_steps": decay_steps})})
    if record is not None and (differences := differing_keys(record.config, settled)):
        raise RunMismatchError(
            f"run {config.run_name!r} was made with other settings: {'; '.join(differences)}. "
            "Use another run_name, or the settings it was made with"
        )
    return settled


def completed_step(config: RunConfig) -> int | None:
    """The last step if this run is complete, else None. Reads only.

    A run whose process died between its last commit and its end is not: opening it once more ends it properly.

    Quick, unless `data.path` is not the one in `run.json`: then a complete run has its data described and compared, as
    a start would, because saying "complete" of other data would be wrong.

    Raises:
        DataError: the data at another path is not what the run was trained on, or cannot be read.
        ShoalError: as `read_run`, `settle_config` and `describe_job`.
    """
    store = run_store(config.storage, config.run_name)
    record = read_run(store)
    if record is None:
        return None
    settle_config(config, record)
    commits = Catalog(store).commits()
    # A run that was trained further than now asked for is complete as well.
    if not commits or commits[0].step < config.steps:
        return None
    if not is_held(store) and RunHistory.load(store).state == "dead":
        return None
    if config.data.path != record.config.data.path:
        _check_same(record, describe_job(config))
    return commits[0].step


def check_startable(
    config: RunConfig, description: JobDescription, *, device_memory_bytes: int | None
) -> tuple[RunConfig, RunRecord | None]:
    """Everything that can be refused by looking alone. Returns the settled configuration and run.json if it exists.

    Raises:
        ConfigError: the trace or the program of `capacity` cannot be used.
        DataError: shorter than one batch, or not the data that the run was begun with.
        PlanError: the model cannot fit at `num_hosts.min`.
        RunMismatchError: another job or other fixed settings under the same name.
    """
    check_provider(config.capacity)
    data = description.data
    assert data is not None
    if data.num_samples < config.global_batch_size:
        raise DataError(
            f"the data ({data.description}) has {data.num_samples} samples, one batch needs {config.global_batch_size} "
            "(global_batch_size): give more data, a smaller batch or shorter samples"
        )
    refusal = check_minimum(config, description.footprint, device_memory_bytes)
    if refusal is not None:
        raise PlanError(f"{refusal.reason}; {refusal.needed}")
    record = read_run(run_store(config.storage, config.run_name))
    settled = settle_config(config, record)
    if record is not None:
        _check_same(record, description)
    return settled, record


def open_run(config: RunConfig, description: JobDescription, *, device_memory_bytes: int | None) -> OpenedRun:
    """Check everything, storage included, then create or accept run.json.

    Raises:
        StorageError: the storage cannot be written, read and deleted.
        ShoalError: as `check_startable`.
    """
    config, record = check_startable(config, description, device_memory_bytes=device_memory_bytes)
    store = run_store(config.storage, config.run_name)
    store.probe()
    resumed = record is not None
    if record is None:
        assert description.data is not None
        record = RunRecord(
            config=config,
            job_fingerprint=description.fingerprint,
            data=description.data,
            tokens_per_row=description.tokens_per_row,
            created=time.time(),
        )
        store.write(RUN_KEY, to_json(record, indent=2))
    return OpenedRun(store=store, config=config, record=record, resumed=resumed)


def _check_same(record: RunRecord, description: JobDescription) -> None:
    assert description.data is not None
    if record.data.content_hash != description.data.content_hash:
        raise DataError(
            f"run {record.config.run_name!r} was begun with other data: {record.data.description} "
            f"({record.data.content_hash[:12]}…), now {description.data.description} "
            f"({description.data.content_hash[:12]}…). Use another run_name, or bring the first data back"
        )
    if record.job_fingerprint != description.fingerprint:
        raise RunMismatchError(
            f"run {record.config.run_name!r} was begun with another model: the job {record.config.job!r} "
            "now has other parameters or shapes. Use another run_name"
        )
