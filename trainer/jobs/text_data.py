"""Text as training data: the bytes of files, one after another, cut into overlapping windows."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from trainer.errors import DataError

READ_BYTES = 1 << 20

# Parts of the standard library's directory that are installed later, generated, or tests.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})


class TextSource:
    """`DataSource` of `{"tokens": int32 (seq_len + 1,)}`: sample i is the window at byte `i * seq_len`.

    Windows share one byte, so that each byte but the first is predicted exactly once; what does not fill a last window
    (fewer than `seq_len` bytes) is not used. Files are ordered by relative path and joined without a separator.

    Opening reads no file. Reading opens the file anew each time: no descriptor is held however many files
    there are, threads share nothing, and a file cut short under a running job is a `DataError`, where a memory map
    would be a SIGBUS.

    Args:
        path: A file; a directory (every regular file below it, hidden ones and linked directories skipped); a glob,
            `**` included; or None, the `.py` files of this interpreter's standard library.
        seq_len: Bytes from one window to the next.

    Raises:
        DataError: nothing there, nothing in it, less than one sample, or unreadable.
    """

    def __init__(self, path: str | None, *, seq_len: int) -> None:
        assert seq_len >= 1
        self.seq_len = seq_len
        self._given = "the Python standard library" if path is None else f"data.path {path!r}"
        try:
            self._root, self._names = _stdlib_files() if path is None else _list_files(os.path.expanduser(path))
            sizes = [(self._root / name).stat().st_size for name in self._names]
        except OSError as error:
            raise self._unreadable(error) from error
        if not self._names:
            raise DataError(f"{self._given} holds no files; give a file, or a directory or glob with text files in it")
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.num_bytes = int(self._ends[-1])
        if self.num_bytes <= seq_len:
            raise DataError(
                f"{self._given} holds {self.num_bytes} bytes in {self._num_files}; one sample needs "
                f"{seq_len + 1}: add text or lower job_params.seq_len"
            )

    def __str__(self) -> str:
        return f"{self._given} ({self._num_files}, {self.num_bytes:,} bytes)"

    def __len__(self) -> int:
        return (self.num_bytes - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self._read(int(index) * self.seq_len, self.seq_len + 1)
        return {"tokens": np.frombuffer(window, np.uint8).astype(np.int32)}

    def content_hash(self) -> str:
        digest = hashlib.sha256(f"text windows of {self.seq_len}\n".encode())
        for number, name in enumerate(self._names):
            encoded = os.fsencode(name)
            # Lengths first, so that no byte can move from one name or file into its neighbour unseen.
            digest.update(f"{len(encoded)} {self._size(number)}\n".encode() + encoded)
            for block in self._blocks(number):
                digest.update(block)
        return digest.hexdigest()

    def baseline_loss(self) -> float:
        """Nats per byte of a model that knows how frequent each byte is and nothing else."""
        counts = np.zeros(256, np.int64)
        for number in range(len(self._names)):
            for block in self._blocks(number):
                counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    @property
    def _num_files(self) -> str:
        return f"{len(self._names)} file{'' if len(self._names) == 1 else 's'}"

    def _size(self, number: int) -> int:
        return int(self._ends[number] - (self._ends[number - 1] if number else 0))

    def _blocks(self, number: int) -> Iterator[bytes]:
        size = self._size(number)
        for offset in range(0, size, READ_BYTES):
            yield self._read_file(number, offset, min(READ_BYTES, size - offset))

    def _read(self, start: int, length: int) -> bytes:
        """Bytes of the concatenation; a window may run across any number of files, empty ones included."""
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while length:
            size = self._size(number)
            offset = start - (int(self._ends[number]) - size)
            part = self._read_file(number, offset, min(length, size - offset))
            parts.append(part)
            start, length, number = start + len(part), length - len(part), number + 1
        return b"".join(parts)

    def _read_file(self, number: int, offset: int, length: int) -> bytes:
        if not length:
            return b""
        file = self._root / self._names[number]
        try:
            with open(file, "rb", buffering=0) as opened:
                opened.seek(offset)
                data = opened.read(length)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) < length:
            raise DataError(
                f"{str(file)!r} ends at byte {offset + len(data)} and was longer when it was opened; "
                "training data must not change during a run"
            )
        return data

    def _unreadable(self, error: OSError) -> DataError:
        where = f": {error.filename!r}" if error.filename else ""
        return DataError(
            f"{self._given} cannot be read ({error.strerror or error}{where}); check the path and its rights"
        )


def _stdlib_files() -> tuple[Path, list[str]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, [name for name in _walk(root, skip=_NOT_STDLIB) if name.endswith(".py")]


def _list_files(path: str) -> tuple[Path, list[str]]:
    """The root and the sorted names below it, which alone enter the content hash: the data may be moved."""
    if os.path.isdir(path):
        return Path(path), _walk(Path(path), skip=frozenset())
    if os.path.exists(path):
        return Path(path).parent, [Path(path).name]
    if not glob.has_magic(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    parts = Path(path).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    names = glob.glob(os.path.join(*parts[fixed:]), root_dir=root, recursive=True)
    return root, sorted({name for name in names if (root / name).is_file()})


def _walk(root: Path, *, skip: frozenset[str]) -> list[str]:
    names = []

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        for name in files:
            file = Path(folder, name)
            if not name.startswith(".") and _is_data(file):
                names.append(file.relative_to(root).as_posix())
    return sorted(names)


def _is_data(file: Path) -> bool:
    """Whether this is a regular file; a dangling link raises, because skipping it would change the data unseen."""
    return stat.S_ISREG(file.stat().st_mode)
