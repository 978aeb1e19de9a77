"""From a finished save to a committed checkpoint, in the background of training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from trainer import records, wire
from trainer.config import CheckpointConfig
from trainer.control.catalog import Catalog, Retention
from trainer.control.journal import Journal
from trainer.control.lease import Lease
from trainer.errors import LeaseError, StorageError
from trainer.records import CommitRecord

LOG = logging.getLogger("shoal")


class Commits:
    """What the controller knows of the run's checkpoints. Called on its event loop; reads and writes on its storage
    thread, through `in_storage`.

    Args:
        on_progress: called when the highest committed step of the run rose.
        on_lease_lost: called with the LeaseError; nothing is committed from then on.
    """

    def __init__(
        self,
        *,
        config: CheckpointConfig,
        catalog: Catalog,
        lease: Lease,
        journal: Journal,
        in_storage: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_progress: Callable[[], None],
        on_lease_lost: Callable[[LeaseError], None],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._lease = lease
        self._journal = journal
        self._in_storage = in_storage
        self._on_progress = on_progress
        self._on_lease_lost = on_lease_lost
        self._in_flight: set[asyncio.Task[None]] = set()
        self.step = 0
        """Highest committed step that may be used; 0: none."""
        self.last_failure = "no save was reported"
        """Why the last save or commit that failed did."""

    # --- what the worker group reports -------------------------------------------------------------------------------

    def saving(self, message: wire.Saving) -> None:
        self._journal.record(records.CheckpointSaving, step=message.step, blocking_seconds=message.blocking_seconds)

    def saved(self, incarnation: int, message: wire.Saved) -> None:
        task = asyncio.create_task(self._commit(incarnation, message))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    def failed(self, step: int, reason: str) -> None:
        self.last_failure = reason
        self._journal.record(records.CheckpointFailed, step=step, reason=reason)

    async def settle(self) -> None:
        """Return once everything that was saved is committed, or has failed to be."""
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    # --- choosing ----------------------------------------------------------------------------------------------------

    async def choose(self) -> CommitRecord | None:
        """The newest checkpoint that is what its record says; others are set aside on the way."""

        def choose() -> tuple[CommitRecord | None, list[tuple[CommitRecord, str]]]:
            bad: list[tuple[CommitRecord, str]] = []
            for record, problem in self._catalog.newest_usable():
                if problem is None:
                    return record, bad
                self._catalog.quarantine(record, problem)
                bad.append((record, problem))
            return None, bad

        chosen: CommitRecord | None
        chosen, bad = await self._in_storage(choose)
        for record, problem in bad:
            self._journal.record(
                records.CheckpointQuarantined, step=record.step, of_incarnation=record.incarnation, reason=problem
            )
        self.step = chosen.step if chosen else 0
        return chosen

    async def _commit(self, incarnation: int, message: wire.Saved) -> None:
        started = time.monotonic()

        def commit() -> tuple[CommitRecord, list[CommitRecord]]:
            record = self._catalog.commit(incarnation, message.step, still_ours=self._lease.renew)
            retention = Retention(keep_last_n=self._config.keep_last_n, keep_every=self._config.keep_every)
            return record, self._catalog.expired(retention)

        try:
            record, expired = await self._in_storage(commit)
        except LeaseError as error:
            self._on_lease_lost(error)
            return
        except StorageError as error:
            self.failed(message.step, str(error))
            return
        if record.step > self.step:
            self.step = record.step
            self._on_progress()
        self._journal.record(
            records.CheckpointCommitted,
            step=record.step,
            nbytes=sum(file.size for file in record.files),
            save_seconds=message.seconds,
            verify_seconds=time.monotonic() - started,
        )
        for old in expired:
            await self._delete(old)

    async def _delete(self, record: CommitRecord) -> None:
        try:
            await self._in_storage(lambda: self._catalog.delete(record))
        except StorageError as error:
            # Nothing is lost by keeping it: the next commit tries again.
            LOG.warning("the checkpoint of step %d could not be deleted: %s", record.step, error)
        else:
            self._journal.record(records.CheckpointDeleted, step=record.step, of_incarnation=record.incarnation)
