"""Text windows over real files."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from trainer.errors import DataError
from trainer.jobs import text_data
from trainer.jobs.protocol import DataSource
from trainer.jobs.text_data import TextSource


def write(root: Path, **files: bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def window(source: TextSource, index: int) -> bytes:
    tokens = source[index]["tokens"]
    assert tokens.dtype == np.int32
    assert tokens.shape == (source.seq_len + 1,)
    return bytes(tokens.astype(np.uint8))


def test_text_source_is_a_data_source(tmp_path: Path) -> None:
    assert isinstance(TextSource(str(write(tmp_path, a=b"four")), seq_len=1), DataSource)


@settings(max_examples=80, deadline=None)
@given(contents=st.lists(st.binary(max_size=40), min_size=1, max_size=6), seq_len=st.integers(1, 50))
def test_windows_tile_the_bytes_and_lose_only_the_tail(contents: list[bytes], seq_len: int) -> None:
    whole = b"".join(contents)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), **{f"file{number}": content for number, content in enumerate(contents)})
        if len(whole) <= seq_len:
            with pytest.raises(DataError):
                TextSource(folder, seq_len=seq_len)
            return
        source = TextSource(folder, seq_len=seq_len)
        windows = [window(source, index) for index in range(len(source))]
    assert all(one[-1] == other[0] for one, other in itertools.pairwise(windows))
    joined = windows[0] + b"".join(following[1:] for following in windows[1:])
    assert whole.startswith(joined)
    assert len(whole) - len(joined) < seq_len


def test_a_window_runs_across_several_files_and_empty_ones(tmp_path: Path) -> None:
    source = TextSource(str(write(tmp_path, a=b"abc", b=b"", c=b"d", d=b"", e=b"efgh")), seq_len=5)
    assert window(source, 0) == b"abcdef"
    assert len(source) == 1


def test_an_index_outside_the_data_is_an_index_error(tmp_path: Path) -> None:
    source = TextSource(str(write(tmp_path, a=b"12345")), seq_len=2)
    assert len(source) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            source[index]


def test_files_come_in_order_of_their_relative_paths_without_hidden_ones(tmp_path: Path) -> None:
    write(tmp_path, b=b"B", a=b"A")
    (tmp_path / ".hidden").write_bytes(b"H")
    write(tmp_path / ".git", config=b"G")
    write(tmp_path / "aa", z=b"Z")
    os.mkfifo(tmp_path / "pipe")
    assert window(TextSource(str(tmp_path), seq_len=2), 0) == b"AZB"


def test_a_single_file_and_a_glob_select_what_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write(tmp_path, skip=b"----") / "one.txt").write_bytes(b"one")
    (write(tmp_path / "deep") / "two.txt").write_bytes(b"two")
    (tmp_path / "folder.txt").mkdir()
    assert window(TextSource(str(tmp_path / "one.txt"), seq_len=2), 0) == b"one"
    assert window(TextSource(str(tmp_path / "**" / "*.txt"), seq_len=5), 0) == b"twoone"
    monkeypatch.chdir(tmp_path)
    assert window(TextSource("*/*.txt", seq_len=2), 0) == b"two"


def test_its_description_counts_files_and_bytes(tmp_path: Path) -> None:
    root = write(tmp_path, a=b"text")
    assert str(TextSource(str(root), seq_len=2)) == f"data.path {str(root)!r} (1 file, 4 bytes)"
    write(tmp_path, b=b"more")
    assert str(TextSource(str(root), seq_len=2)) == f"data.path {str(root)!r} (2 files, 8 bytes)"


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "data[1].txt").write_bytes(b"brackets")
    assert window(TextSource(str(tmp_path / "data[1].txt"), seq_len=7), 0) == b"brackets"


def test_the_default_is_the_standard_library_and_opens_quickly() -> None:
    source = TextSource(None, seq_len=64)
    names = source._names
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not any(re.search(r"(^|/)(site-packages|dist-packages|tests?|__pycache__)/", name) for name in names)
    assert all(name.endswith(".py") for name in names)
    assert len(source) > 50_000
    assert window(source, 0).isascii()


def test_the_hash_sees_every_byte_and_every_name_and_nothing_else(tmp_path: Path) -> None:
    def digest(root: Path, seq_len: int = 2) -> str:
        return TextSource(str(root), seq_len=seq_len).content_hash()

    original = digest(write(tmp_path / "original", a=b"123", b=b"456"))
    assert digest(write(tmp_path / "moved", a=b"123", b=b"456")) == original
    different = {
        "byte": digest(write(tmp_path / "byte", a=b"123", b=b"457")),
        "name": digest(write(tmp_path / "name", a=b"123", c=b"456")),
        "border": digest(write(tmp_path / "border", a=b"1234", b=b"56")),
        "extra empty file": digest(write(tmp_path / "extra", a=b"123", b=b"456", c=b"")),
        "window": digest(tmp_path / "original", seq_len=3),
    }
    assert len({original, *different.values()}) == 1 + len(different)


def test_hash_and_baseline_read_files_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextSource(str(write(tmp_path, a=bytes(range(256)) * 3, b=b"x" * 10)), seq_len=8)
    whole = source.content_hash(), source.baseline_loss()
    monkeypatch.setattr(text_data, "READ_BYTES", 7)
    assert (source.content_hash(), source.baseline_loss()) == whole


def test_the_baseline_is_the_unigram_entropy(tmp_path: Path) -> None:
    assert TextSource(str(write(tmp_path / "two", a=b"abab")), seq_len=1).baseline_loss() == pytest.approx(math.log(2))
    assert TextSource(str(write(tmp_path / "one", a=b"aaaa")), seq_len=1).baseline_loss() == 0
    uneven = TextSource(str(write(tmp_path / "uneven", a=b"aaab")), seq_len=1).baseline_loss()
    assert uneven == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_threads_and_copies_read_the_same_samples() -> None:
    source = TextSource(None, seq_len=1000)
    indices = [(index * 7919) % len(source) for index in range(400)]
    expected = [window(source, index) for index in indices]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda index: window(source, index), indices)) == expected
    copy = pickle.loads(pickle.dumps(source))
    assert [window(copy, index) for index in indices[:10]] == expected[:10]


def test_many_files_hold_no_descriptors_open(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{number}": b"text" for number in range(50)})
    before = len(os.listdir("/proc/self/fd"))
    source = TextSource(str(tmp_path), seq_len=2)
    for index in range(len(source)):
        source[index]
    assert len(os.listdir("/proc/self/fd")) == before


def dangling_link(root: Path) -> str:
    (root / "link").symlink_to(root / "gone")
    return str(root)


def empty_file(root: Path) -> str:
    (root / "empty").touch()
    return str(root)


def short_file(root: Path) -> str:
    (root / "short").write_bytes(b"12345678")
    return str(root / "short")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda root: str(root / "nowhere"),
            r"^data\.path '.*nowhere' cannot be read \(No such file or directory: '.*nowhere'\)",
        ),
        (lambda root: "", r"^data\.path '' cannot be read \(No such file"),
        (lambda root: str(root), r"^data\.path '.*' holds no files; give"),
        (lambda root: str(root / "*.txt"), r"^data\.path '.*\*\.txt' holds no files; give"),
        (empty_file, r"^data\.path '.*' holds 0 bytes in 1 file; one sample needs 9: "),
        (
            short_file,
            r"^data\.path '.*' holds 8 bytes in 1 file; one sample needs 9: add text or lower job_params",
        ),
        (dangling_link, r"^data\.path '.*' cannot be read \(No such file or directory: '.*link'\)"),
    ],
    ids=["missing", "empty path", "empty directory", "glob without match", "no bytes", "too short", "dangling link"],
)
def test_data_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], str], message: str
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        TextSource(make(tmp_path), seq_len=8)
    assert "\n" not in str(refused.value)


def test_a_file_cut_short_or_removed_under_a_running_job_is_a_data_error(tmp_path: Path) -> None:
    source = TextSource(str(write(tmp_path, a=b"0123456789")), seq_len=9)
    (tmp_path / "a").write_bytes(b"01234")
    with pytest.raises(DataError, match=r"a' ends at byte 5 and was longer when it was opened"):
        source[0]
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory"):
        source.content_hash()
