"""What can go wrong, as a person or a script sees it.

    ShoalError
    ├── RefusedError (ValueError)      exit 2   the request cannot work as asked; nothing was done
    │   ├── ConfigError                         a key or value of the configuration
    │   ├── PlanError                           no legal topology, or the model cannot fit
    │   └── RunMismatchError                    the run of that name was made with something else
    ├── UserCodeError (RuntimeError)   exit 3   the job's own code raised; never retried
    │   └── DataError                           the data is empty, too short, changed or unreadable
    ├── BudgetSpentError (RuntimeError) exit 4  too many failures without progress, or no capacity in time
    ├── StoppedError (RuntimeError)    exit 5   stopped by a signal, state saved
    ├── StorageError (OSError)         exit 6   the storage failed or does not hold what it should
    │   └── LeaseError                          somebody else holds the run
    └── SegmentFailedError (RuntimeError)       a segment ended without progress; Prefect retries it
        └── GroupFailedError                    a worker group could not be formed or died

Each class carries its exit code, so that the command line never has to interpret messages. Across a
process boundary failure is a value (see `trainer.wire`), inside one it is one of these.
"""

from __future__ import annotations

from typing import ClassVar


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""

    exit_code: ClassVar[int] = 1


class RefusedError(ShoalError, ValueError):
    """The request cannot work as asked. Raised before any work; nothing was written."""

    exit_code = 2


class ConfigError(RefusedError):
    """A configuration key is unknown or its value is not allowed."""


class PlanError(RefusedError):
    """No legal topology exists, or the model does not fit at `num_hosts.min`."""


class RunMismatchError(RefusedError):
    """The run directory belongs to a run with other data, another job or other fixed settings."""


class UserCodeError(ShoalError, RuntimeError):
    """The job's own code raised. `details` holds the traceback of the worker that raised first."""

    exit_code = 3

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class DataError(UserCodeError):
    """The data is empty, shorter than one batch, changed since the run began, or unreadable."""


class BudgetSpentError(ShoalError, RuntimeError):
    """`elastic.max_failures` without progress, or `elastic.wait_for_capacity_seconds`, is used up by `cause`."""

    exit_code = 4

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class StoppedError(ShoalError, RuntimeError):
    """A signal ended the run at a step boundary and its state is committed."""

    exit_code = 5


class StorageError(ShoalError, OSError):
    """The storage cannot be used, or holds something else than its records say."""

    exit_code = 6


class LeaseError(StorageError):
    """Another controller holds the run's lease, or took it over. `started_by` is what that one was started by."""

    def __init__(self, message: str, *, started_by: str | None = None) -> None:
        super().__init__(message)
        self.started_by = started_by


class SegmentFailedError(ShoalError, RuntimeError):
    """A segment ended without progress. `cause` is the word that the journal records."""

    exit_code = 4

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class GroupFailedError(SegmentFailedError):
    """A worker group could not be formed, or ended before its first step."""
