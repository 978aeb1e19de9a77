"""The run's lease: one controller at a time may command workers and commit checkpoints.

`lease.json` changes by compare-and-swap only. A holder renews it; whoever wants it watches the renewal count stand
still for `lease_seconds` on their own clock, so that no two clocks are ever compared. On the machine of the holder a
shorter way is safe: a holder whose process is provably gone can be replaced at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import pydantic

from trainer.errors import LeaseError, StorageError
from trainer.processes import boot_id, identify, is_alive
from trainer.records import LeaseRecord, to_json
from trainer.store import Store

LEASE_KEY = "lease.json"
LEASE_SECONDS = 10.0
RENEW_SECONDS = 2.0
_POLL_SECONDS = 0.25


class Lease:
    """Held from `acquire` to `release`. Threads may renew at once: each renewal is one `Store.update`."""

    def __init__(self, store: Store, holder: str, started_by: str | None = None) -> None:
        self._store = store
        self.holder = holder
        self.started_by = started_by
        self.incarnation = 0

    def acquire(self, wait_seconds: float, on_wait: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, waiting for a silent holder to expire if need be.

        Raises:
            LeaseError: the holder is alive (it renewed while we watched), or still not expired after `wait_seconds`.
        """
        deadline = time.monotonic() + wait_seconds
        seen: tuple[str | None, int] | None = None
        seen_at = 0.0
        while True:
            record = read_lease(self._store)
            if record is None or record.holder is None or holder_is_dead(record):
                break
            if seen != (record.holder, record.renewals):
                if seen is not None:
                    raise _held(record, "is training this run")
                if is_here(record):
                    # The process lives, on this machine: waiting would only show what is known already.
                    raise _held(record, "is training this run")
                seen, seen_at = (record.holder, record.renewals), time.monotonic()
                on_wait(
                    f"{describe_holder(record)} held the lease; waiting {record.lease_seconds:.0f} s for it to expire"
                )
            elif time.monotonic() - seen_at >= record.lease_seconds:
                break
            if time.monotonic() > deadline:
                raise _held(record, "holds the lease of this run")
            time.sleep(_POLL_SECONDS)
        expected = record

        def take(old: bytes | None) -> bytes:
            current = _parse(old)
            if (current and (current.holder, current.renewals)) != (expected and (expected.holder, expected.renewals)):
                raise LeaseError("another controller took the lease of this run in the same moment")
            self.incarnation = current.incarnation if current else _highest_used(self._store)
            return to_json(self._record(renewals=current.renewals + 1 if current else 1))

        self._store.update(LEASE_KEY, take)

    def renew(self, incarnation: int | None = None) -> None:
        """Prove that the lease is still ours, and record the newest incarnation before it starts.

        Raises:
            LeaseError: somebody else holds it. Nothing may be committed any more.
        """

        def again(old: bytes | None) -> bytes:
            current = _parse(old)
            if current is None or current.holder != self.holder:
                raise LeaseError(
                    f"the lease of this run was taken by {describe_holder(current) if current else 'nobody known'}",
                    started_by=current.started_by if current else None,
                )
            self.incarnation = max(current.incarnation, incarnation or 0)
            return to_json(self._record(renewals=current.renewals + 1))

        self._store.update(LEASE_KEY, again)

    def release(self) -> None:
        """Give the lease back, if it is still ours."""

        def free(old: bytes | None) -> bytes:
            current = _parse(old)
            if current is None or current.holder != self.holder:
                raise LeaseError("not ours any more")
            return to_json(current.model_copy(update={"holder": None, "renewals": current.renewals + 1}))

        with contextlib.suppress(LeaseError):  # lost before: then there is nothing to give back
            self._store.update(LEASE_KEY, free)

    def _record(self, renewals: int) -> LeaseRecord:
        return LeaseRecord(
            holder=self.holder,
            renewals=renewals,
            incarnation=self.incarnation,
            host_name=socket.gethostname(),
            process=identify(os.getpid()),
            lease_seconds=LEASE_SECONDS,
            started_by=self.started_by,
        )


def read_lease(store: Store) -> LeaseRecord | None:
    return _parse(store.read(LEASE_KEY))


def is_held(store: Store) -> bool:
    """Whether somebody seems to hold the lease, as far as one look can tell."""
    record = read_lease(store)
    return record is not None and record.holder is not None and not holder_is_dead(record)


def is_here(record: LeaseRecord) -> bool:
    """Whether the holder runs (or ran) on this machine since its last boot, so that its process can be looked up."""
    return record.host_name == socket.gethostname() and record.process.boot_id == boot_id()


def holder_is_dead(record: LeaseRecord) -> bool:
    """Whether the holder is provably gone. False when it cannot be known from here."""
    return is_here(record) and not is_alive(record.process)


def describe_holder(record: LeaseRecord) -> str:
    return f"controller {record.holder} (process {record.process.pid} on {record.host_name})"


def _held(record: LeaseRecord, doing: str) -> LeaseError:
    return LeaseError(f"{describe_holder(record)} {doing}", started_by=record.started_by)


def _highest_used(store: Store) -> int:
    """Without a lease file the directories still tell: no incarnation number may ever be used twice."""
    names = [name for prefix in ("checkpoints", "metrics", "journal") for name in store.names(prefix)]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _parse(data: bytes | None) -> LeaseRecord | None:
    if data is None:
        return None
    try:
        return LeaseRecord.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise StorageError(
            f"{LEASE_KEY} is not readable: {error.errors()[0]['msg']}; move it away to start over"
        ) from error
