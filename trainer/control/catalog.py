"""The checkpoints of a run: commit, verify, choose, retain, set aside.

A checkpoint is usable when its commit record exists, no quarantine record names it, no rollback has abandoned it, and
every file it lists has the size and the crc32c it had when it was committed. Only the lease-holding controller writes
or deletes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c
import pydantic

from trainer.errors import StorageError
from trainer.records import CommitRecord, FileRecord, QuarantineRecord, RollbackRecord, to_json
from trainer.store import LocalStore, checkpoint_path

_CHUNK = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Retention:
    keep_last_n: int
    keep_every: int | None


class Catalog:
    """Blocking calls that read whole checkpoints: the controller runs them on its storage thread."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def commits(self) -> list[CommitRecord]:
        """The readable commit records of the current line of history that are not quarantined.

        Newest step first, then newest incarnation.

        Raises:
            StorageError: as `rollbacks`.
        """
        rollbacks = self.rollbacks()
        return [
            record
            for record in self._committed()
            if not any(rollback.hides(record.step, record.incarnation) for rollback in rollbacks)
        ]

    def rollbacks(self) -> list[RollbackRecord]:
        """Oldest first.

        Raises:
            StorageError: one cannot be read. Without it abandoned checkpoints would be used again.
        """
        found = []
        for number in self._rollback_numbers():
            key = _rollback_key(number)
            try:
                found.append(RollbackRecord.model_validate_json(self._store.read(key) or b""))
            except pydantic.ValidationError as error:
                raise StorageError(
                    f"{self._store.location}/{key} cannot be read: {error.errors()[0]['msg']}. It says which "
                    "checkpoints were abandoned; move it away to use them again"
                ) from error
        return found

    def roll_back(self, record: RollbackRecord) -> None:
        """Abandon what `record` says, from now on."""
        number = 1 + max(self._rollback_numbers(), default=0)
        self._store.write(_rollback_key(number), to_json(record, indent=1))

    def _rollback_numbers(self) -> list[int]:
        stems = [name.removesuffix(".json") for name in self._store.names("rollbacks") if name.endswith(".json")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _committed(self) -> list[CommitRecord]:
        """Of every line of history."""
        quarantined = {name.removesuffix(".json") for name in self._store.names("quarantine")}
        records = []
        for name in self._store.names("commits"):
            if not name.endswith(".json") or name.removesuffix(".json") in quarantined:
                continue
            try:
                if (data := self._store.read(f"commits/{name}")) is not None:
                    records.append(CommitRecord.model_validate_json(data))
            except (StorageError, pydantic.ValidationError):
                continue  # a torn or unreadable record is no commit; its checkpoint stays where it is
        return sorted(records, key=lambda record: (record.step, record.incarnation), reverse=True)

    def commit(self, incarnation: int, step: int, *, still_ours: Callable[[], None]) -> CommitRecord:
        """Read the finished checkpoint back, record what every file holds, and make it usable.

        Reading may take longer than a lease lasts: `still_ours` is called right before the record is written.

        Raises:
            LeaseError: from `still_ours`; nothing was committed.
            StorageError: it is not there or holds no metadata, so Orbax did not finish it.
        """
        path = checkpoint_path(incarnation, step)
        files = tuple(
            FileRecord(path=name, size=size, crc32c=self._checksum(f"{path}/{name}"))
            for name, size in self._store.files(path)
        )
        if not any(file.path.endswith("_METADATA") for file in files):
            raise StorageError(f"{self._store.location}/{path} is not a finished checkpoint: it holds no metadata")
        record = CommitRecord(step=step, incarnation=incarnation, path=path, files=files, committed=time.time())
        still_ours()
        self._store.write(_commit_key(record), to_json(record, indent=1))
        return record

    def problem(self, record: CommitRecord) -> str | None:
        """Why this checkpoint differs from what was committed, or None if it is whole."""
        present = dict(self._store.files(record.path))
        for file in record.files:
            if file.path not in present:
                return f"{file.path} is missing"
            if present[file.path] != file.size:
                return f"{file.path} has {present[file.path]} bytes, committed were {file.size}"
        for file in record.files:
            try:
                checksum = self._checksum(f"{record.path}/{file.path}")
            except StorageError as error:
                return str(error)  # as good as damaged: the next older one may be readable
            if checksum != file.crc32c:
                return f"{file.path} has crc32c {checksum}, committed was {file.crc32c}"
        return None

    def newest_usable(self) -> Iterator[tuple[CommitRecord, str | None]]:
        """Newest first, each with its problem; the caller quarantines the bad ones and stops at the first good one."""
        for record in self.commits():
            yield record, self.problem(record)

    def quarantine(self, record: CommitRecord, reason: str) -> None:
        """Never use this checkpoint again. Its data and its commit record stay where they are."""
        note = QuarantineRecord(step=record.step, incarnation=record.incarnation, reason=reason, found=time.time())
        self._store.write(f"quarantine/{record.step}.{record.incarnation}.json", to_json(note, indent=1))

    def expired(self, retention: Retention) -> list[CommitRecord]:
        """Committed checkpoints of the current line of history that need not be kept. Never the newest.

        What a rollback abandoned neither counts nor expires.
        """
        commits = self.commits()
        steps = sorted({record.step for record in commits}, reverse=True)
        kept = set(steps[: retention.keep_last_n])
        if retention.keep_every is not None:
            kept |= {step for step in steps if step % retention.keep_every == 0}
        return [record for record in commits if record.step not in kept]

    def delete(self, record: CommitRecord) -> None:
        # The record goes first: a record must never promise data that is half gone.
        self._store.delete_tree(_commit_key(record))
        self._store.delete_tree(record.path)

    def _checksum(self, key: str) -> str:
        checksum = google_crc32c.Checksum()
        try:
            with self._store.path(key).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    checksum.update(chunk)
        except OSError as error:
            raise StorageError(f"cannot read {self._store.path(key)}: {error.strerror}") from error
        digest: bytes = checksum.hexdigest()
        return digest.decode()


def _rollback_key(number: int) -> str:
    return f"rollbacks/{number}.json"


def _commit_key(record: CommitRecord) -> str:
    return f"commits/{record.step}.{record.incarnation}.json"
