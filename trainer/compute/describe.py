"""Describe a job and its data as JSON, without opening a JAX backend.

    python -P -m trainer.compute.describe [--no-data] < config.json

Prints a `JobDescription` and exits 0, or a `JobFailure` and exits 3.
"""

from __future__ import annotations

import contextlib
import os
import sys

from trainer.compute.train_state import (
    abstract_train_state,
    fingerprint,
    footprint_of,
    make_optimizer,
    state_axes,
)
from trainer.config import RunConfig
from trainer.description import JobDescription, JobFailure
from trainer.jobs.registry import make_job, resolve
from trainer.records import DataRecord


def describe(config: RunConfig, *, with_data: bool) -> JobDescription:
    """Raises what the job raises, and the errors of `make_job`."""
    job = make_job(config.job, config.job_params)
    optimizer = config.optimizer.model_copy(update={"decay_steps": config.optimizer.decay_steps or config.steps})
    transformation = make_optimizer(optimizer)
    state = abstract_train_state(job, transformation)
    footprint = footprint_of(job, state, state_axes(job, transformation, state))
    job_params = resolve(config.job).Params.model_validate(config.job_params).model_dump(mode="json")
    data = None
    if with_data:
        source = job.data(config.data.path)
        data = DataRecord(
            description=str(source) if type(source).__str__ is not object.__str__ else type(source).__qualname__,
            content_hash=source.content_hash(),
            num_samples=len(source),
            baseline_loss=source.baseline_loss(),
        )
    return JobDescription(
        job_params=job_params,
        footprint=footprint,
        fingerprint=fingerprint(config.job, job_params, footprint),
        tokens_per_row=job.tokens_per_row,
        data=data,
    )


def main() -> int:
    sys.path.append(os.getcwd())  # the user's own job module, after everything that is installed
    config = RunConfig.model_validate_json(sys.stdin.buffer.read())
    with_data = "--no-data" not in sys.argv[1:]
    try:
        # A job may print; stdout carries the answer alone.
        with contextlib.redirect_stdout(sys.stderr):
            answer: JobDescription | JobFailure = describe(config, with_data=with_data)
    except Exception as error:  # noqa: BLE001  see JobFailure.of
        answer = JobFailure.of(error, f"job {config.job!r} cannot be described")
    print(answer.model_dump_json())
    return 0 if isinstance(answer, JobDescription) else 3


if __name__ == "__main__":
    sys.exit(main())
