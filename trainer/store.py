"""Paths and objects of a run directory.

A store is a flat map from relative keys (`commits/100.3.json`) to bytes, plus append-only parts. `LocalStore` keeps
it in a directory; other storages implement the same `Store`. Nothing here knows what the objects mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from trainer.errors import RefusedError, StorageError

# POSIX locks exclude other processes only: the threads of one process share them.
_ONE_UPDATE_PER_PROCESS = threading.Lock()


class AppendPart(Protocol):
    """An object that grows: each `append` is durable against the death of this process when it returns."""

    def append(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Store(Protocol):
    """What Shoal needs of a storage. All methods raise `StorageError` for trouble of the storage itself."""

    @property
    def location(self) -> str:
        """The run directory as a person writes it."""
        ...

    def read(self, key: str) -> bytes | None:
        """The object, or None if there is none. Never a torn one."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object as one action."""
        ...

    def update(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Compare-and-swap: no other `update` of this key runs between reading the old value and writing the new.

        Whatever `change` raises leaves the object as it was.
        """
        ...

    def names(self, prefix: str) -> list[str]:
        """Names directly below the `prefix` directory, sorted; empty if there is none."""
        ...

    def files(self, prefix: str) -> list[tuple[str, int]]:
        """All files below `prefix` as (path relative to it, size), sorted."""
        ...

    def open_part(self, key: str) -> AppendPart: ...

    def delete_tree(self, prefix: str) -> None:
        """Delete an object or everything below a prefix. Missing is fine."""
        ...

    def probe(self) -> None:
        """Prove that objects can be written, read and deleted, or raise `StorageError`."""
        ...


class _LocalPart:
    """O_APPEND and unbuffered: a line that was appended survives the death of the process."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file = file
        self._where = where

    def append(self, data: bytes) -> None:
        with _storage_errors(f"append to {self._where}"):
            while data:  # a disk that fills up takes a part first
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalStore:
    """A run directory on a POSIX file system."""

    def __init__(self, root: Path) -> None:
        # Resolved, so that one directory has one name however it was reached: controllers are found by it.
        self.root = Path(os.path.realpath(root))  # a loop of links is trouble for whoever reads, not here

    @property
    def location(self) -> str:
        return str(self.root)

    def path(self, key: str) -> Path:
        path = self.root / key
        # Keys come from records, which may have been copied from anywhere: none may point outside the run directory.
        if ".." in Path(key).parts or Path(key).is_absolute():
            raise StorageError(f"the key {key!r} leaves the run directory {self.root}")
        return path

    def read(self, key: str) -> bytes | None:
        with _storage_errors(f"read {self.path(key)}"):
            try:
                return self.path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, key: str, data: bytes) -> None:
        path = self.path(key)
        # A name of our own per write: two writers never share a temporary file.
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with _storage_errors(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(path.parent)

    def update(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        path = self.path(key)
        with _storage_errors(f"lock {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The lock file is never deleted: a lock on an unlinked file would exclude nobody.
            lock = (path.parent / f".{path.name}.lock").open("ab")
        with _ONE_UPDATE_PER_PROCESS, lock:
            with _storage_errors(f"lock {path}"):
                fcntl.lockf(lock, fcntl.LOCK_EX)  # lockf, not flock: NFS carries POSIX locks between machines
            new = change(self.read(key))
            self.write(key, new)
            return new

    def names(self, prefix: str) -> list[str]:
        with _storage_errors(f"list {self.path(prefix)}"):
            try:
                return sorted(entry.name for entry in self.path(prefix).iterdir() if not entry.name.startswith("."))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self, prefix: str) -> list[tuple[str, int]]:
        base = self.path(prefix)
        with _storage_errors(f"list {base}"):
            return sorted(
                (str(path.relative_to(base)), path.stat().st_size) for path in base.rglob("*") if path.is_file()
            )

    def open_part(self, key: str) -> _LocalPart:
        path = self.path(key)
        with _storage_errors(f"create {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            return _LocalPart(path.open("ab", buffering=0), str(path))

    def delete_tree(self, prefix: str) -> None:
        path = self.path(prefix)
        with _storage_errors(f"delete {path}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def probe_parent(self) -> None:
        """Prove that this directory could be created and written, without creating it.

        Raises:
            StorageError: naming the nearest existing directory and what is wrong with it.
        """
        with _storage_errors(f"use {self.root}"):
            nearest = next(path for path in [self.root, *self.root.parents] if path.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a directory")
        with (
            _storage_errors(f"use {self.root}: nothing can be created in {nearest}"),
            tempfile.NamedTemporaryFile(dir=nearest, prefix=".shoal-probe-"),
        ):
            pass

    def probe(self) -> None:
        key = f".probe-{uuid.uuid4().hex}"
        self.write(key, b"probe")
        if self.read(key) != b"probe":
            raise StorageError(f"{self.root} does not give back what was written to it")
        self.delete_tree(key)


def checkpoint_path(incarnation: int, step: int) -> str:
    """Where a worker group writes the checkpoint of a step, relative to the run directory."""
    return f"checkpoints/{incarnation}/{step}"


def open_store(location: str) -> LocalStore:
    """The store of a run directory given as a path.

    Raises:
        RefusedError: a scheme that this version cannot serve, or the home directory of an unknown user.
    """
    if "://" in location:
        raise RefusedError(f"{location}: only local paths are supported in this version")
    try:
        return LocalStore(Path(location).expanduser())
    except RuntimeError as error:
        raise RefusedError(f"{location}: there is no home directory of that name") from error


def run_store(storage: str, run_name: str) -> LocalStore:
    """The store of the run directory `<storage>/<run_name>`."""
    return open_store(str(Path(storage) / run_name))


@contextlib.contextmanager
def _storage_errors(action: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot {action}: {error.strerror or error}") from error


def _sync_directory(path: Path) -> None:
    # Without this a rename may be lost by a power failure although the file's content was synced.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
