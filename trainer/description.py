"""What the control plane knows of a job: the JSON that `trainer.compute.describe` prints, and how to ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trainer.config import RunConfig
from trainer.errors import ConfigError, DataError, ShoalError, StorageError, UserCodeError
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


class JobFailure(BaseModel):
    """Printed instead when the job, its data or its state cannot be used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["config", "user", "data", "storage"]
    message: str
    details: str = ""

    @classmethod
    def of(cls, error: Exception, doing: str) -> JobFailure:
        """Whatever the user's code raises is theirs to see, in one line and whole; `doing` begins the line."""
        match error:
            case ConfigError():
                return cls(kind="config", message=str(error))
            case DataError():
                return cls(kind="data", message=str(error), details=error.details)
            case UserCodeError():
                return cls(kind="user", message=str(error), details=error.details)
            case StorageError():
                return cls(kind="storage", message=str(error))
            case _:
                message = f"{doing}: {type(error).__name__}: {error}"
                return cls(kind="user", message=message, details="".join(traceback.format_exception(error)))

    def error(self) -> ShoalError:
        match self.kind:
            case "config":
                return ConfigError(self.message)
            case "data":
                return DataError(self.message, details=self.details)
            case "user":
                return UserCodeError(self.message, details=self.details)
            case "storage":
                return StorageError(self.message)


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
    command = [sys.executable, "-P", "-m", "trainer.compute.describe", *([] if with_data else ["--no-data"])]
    return JobDescription.model_validate_json(ask(command, config, "describing the job"))


def ask(command: Sequence[str], question: str, doing: str) -> bytes:
    """What a short-lived process on the CPU answers on stdout.

    Raises:
        ShoalError: what its `JobFailure` says.
        UserCodeError: it ended without an answer.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, input=question.encode(), capture_output=True, env=environment, check=False)
    if finished.returncode == 0:
        return finished.stdout
    if finished.returncode == 3:
        raise JobFailure.model_validate_json(finished.stdout).error()
    raise UserCodeError(f"{doing} ended with {finished.returncode}", details=finished.stderr.decode(errors="replace"))
