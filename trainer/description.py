"""What the control plane knows of a job: the JSON that `trainer.compute.describe` prints, and how to ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trainer.config import RunConfig
from trainer.errors import ConfigError, DataError, ShoalError, UserCodeError
from trainer.planning.footprint import Footprint
from trainer.records import DataRecord


class JobDescription(BaseModel):
    """A job at its validated parameters, without a device having been touched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_params: dict[str, Any]
    """As the job understood them, defaults filled in."""
    footprint: Footprint
    fingerprint: str
    tokens_per_row: int
    data: DataRecord | None
    """None when only the job was asked about."""


class DescriptionFailure(BaseModel):
    """Printed instead when the job or its data cannot be used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["config", "user", "data"]
    message: str
    details: str = ""

    def error(self) -> ShoalError:
        match self.kind:
            case "config":
                return ConfigError(self.message)
            case "data":
                return DataError(self.message, details=self.details)
            case "user":
                return UserCodeError(self.message, details=self.details)


def describe_job(config: RunConfig, *, with_data: bool = True) -> JobDescription:
    """Ask a short-lived process, because knowing a job takes jax and the caller must not import it.

    Raises:
        ConfigError: `job_params` that the job does not accept.
        UserCodeError: the job's module or class cannot be loaded or described.
        DataError: the data is missing, empty or unreadable.
    """
    return _describe(config.model_dump_json(), with_data)


@lru_cache(maxsize=4)  # the command line asks first, and the flow in the same process asks again
def _describe(config: str, with_data: bool) -> JobDescription:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.compute.describe", *([] if with_data else ["--no-data"])],
        input=config.encode(),
        capture_output=True,
        env=environment,
        check=False,
    )
    if finished.returncode == 0:
        return JobDescription.model_validate_json(finished.stdout)
    if finished.returncode == 3:
        raise DescriptionFailure.model_validate_json(finished.stdout).error()
    raise UserCodeError(
        f"describing the job ended with {finished.returncode}", details=finished.stderr.decode(errors="replace")
    )
