"""Rolling a run back: what it trained beyond a committed step is abandoned, and nothing is deleted.

Looking (`plan_rollback`) and doing (`roll_back`) are two steps, so that a person can be asked in between; what was
looked at must still hold when it is done.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from trainer import records
from trainer.control.catalog import Catalog
from trainer.control.journal import Journal
from trainer.control.lease import Lease, describe_holder, is_held, read_lease
from trainer.control.run import check_is_run
from trainer.errors import LeaseError, RefusedError, StorageError
from trainer.history import RunHistory
from trainer.records import CommitRecord, RollbackRecord
from trainer.store import LocalStore

LOG = logging.getLogger("shoal")

_LEASE_WAIT_SECONDS = 30.0
_STOP_FIRST = "stop it first: a run that is being trained cannot be rolled back"


@dataclass(frozen=True, kw_only=True)
class RollbackPlan:
    """What a rollback would do."""

    target: CommitRecord
    """The run goes on from here. It was whole when it was looked at."""
    newest: CommitRecord
    abandoned_commits: tuple[CommitRecord, ...]
    """Newest first; empty: the target is the newest one, and there is nothing to do."""
    abandoned_steps: int
    """Finished steps of the current line of history beyond the target, committed or not."""

    @property
    def to_step(self) -> int:
        return self.target.step

    @property
    def from_step(self) -> int:
        return self.newest.step

    def summary(self) -> str:
        """A sentence for people."""
        if not self.abandoned_commits:
            return f"step {self.to_step} is the newest committed step already; there is nothing to abandon"
        checkpoints = ", ".join(commit.path for commit in reversed(self.abandoned_commits))
        return (
            f"back from step {self.from_step} to step {self.to_step} ({self.target.path}): abandons the finished steps "
            f"after it ({self.abandoned_steps}) and {checkpoints}; nothing is deleted"
        )


def plan_rollback(store: LocalStore, to_step: int | None) -> RollbackPlan:
    """Look what a rollback would do. Reads the target's checkpoint to verify it, and writes nothing.

    Args:
        to_step: a committed step of the current line of history; None: the newest but one.

    Raises:
        RefusedError: there is no run, or no such step; those that there are are listed.
        StorageError: the step's checkpoint is not what was committed, or the storage cannot be read.
    """
    check_is_run(store)
    catalog = Catalog(store)
    commits = catalog.commits()
    steps = sorted({commit.step for commit in commits})
    if to_step is None:
        if len(steps) < 2:
            raise RefusedError(f"{store.location} has no committed step before its newest one; {_listed(steps)}")
        to_step = steps[-2]
    targets = [commit for commit in commits if commit.step == to_step]
    if not targets:
        raise RefusedError(f"{store.location} cannot be rolled back to step {to_step}; {_listed(steps)}")
    problems = {}
    for target in targets:
        problem = catalog.problem(target)
        if problem is None:
            return RollbackPlan(
                target=target,
                newest=commits[0],
                abandoned_commits=tuple(commit for commit in commits if commit.step > to_step),
                abandoned_steps=sum(step.step > to_step for step in RunHistory.load(store).steps),
            )
        problems[target.path] = problem
    listed = "; ".join(f"{path}: {problem}" for path, problem in problems.items())
    raise StorageError(
        f"{store.location} cannot be rolled back to step {to_step}: its checkpoint is damaged ({listed})"
    )


def check_not_held(store: LocalStore) -> None:
    """Raises LeaseError if somebody trains the run, as far as one look can tell. For whoever is to ask a person first.

    Only `roll_back` itself can be sure.
    """
    if is_held(store):
        holder = read_lease(store)
        assert holder is not None
        raise LeaseError(f"{describe_holder(holder)} is training this run; {_STOP_FIRST}")


def roll_back(
    store: LocalStore, plan: RollbackPlan, reason: str = "", *, on_wait: Callable[[str], None] = LOG.info
) -> RollbackRecord:
    """Abandon what the plan says. Holds the run's lease meanwhile: nobody trains a run that is being rolled back.

    Raises:
        LeaseError: somebody trains the run.
        RefusedError: it has other checkpoints than when it was looked at.
        StorageError: the storage cannot be read or written.
    """
    assert plan.abandoned_commits, "there is nothing to abandon"
    catalog = Catalog(store)
    lease = Lease(store, f"rollback-{uuid.uuid4().hex[:12]}")
    try:
        lease.acquire(wait_seconds=_LEASE_WAIT_SECONDS, on_wait=on_wait)
    except LeaseError as error:
        raise LeaseError(f"{error}; {_STOP_FIRST}") from error
    try:
        commits = catalog.commits()
        if commits[:1] != [plan.newest] or plan.target not in commits:
            now = f"its newest committed step is {commits[0].step}" if commits else "it has no committed step"
            raise RefusedError(
                f"{store.location} has changed since it was looked at: its newest committed step was {plan.from_step}, "
                f"now {now}. Nothing was done; look again"
            )
        record = RollbackRecord(
            to_step=plan.to_step,
            from_step=plan.from_step,
            after_incarnation=lease.incarnation,
            reason=" ".join(reason.split()),
            time=time.time(),
        )
        lease.renew()  # whoever lost the lease must not abandon what another one trains
        catalog.roll_back(record)
        _tell_journal(store, lease, record)
    finally:
        lease.release()
    return record


def _tell_journal(store: LocalStore, lease: Lease, record: RollbackRecord) -> None:
    journal = Journal(store, lease.holder, on_trouble=lambda _: None)  # logged there; the record is what counts
    journal.begin_incarnation(record.after_incarnation)
    journal.record(records.RolledBack, to_step=record.to_step, from_step=record.from_step, reason=record.reason)
    journal.close()


def _listed(steps: list[int]) -> str:
    return f"committed steps: {', '.join(map(str, steps))}" if steps else "it has no committed step"
