"""The local store: whole objects or none, appends that last, keys that stay inside."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.errors import RefusedError, StorageError
from trainer.store import LocalStore, open_store


def test_an_object_reads_back_and_a_missing_one_is_none(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    assert store.read("a/b.json") is None
    store.write("a/b.json", b"1")
    store.write("a/b.json", b"22")
    assert store.read("a/b.json") == b"22"
    assert store.names("a") == ["b.json"], "no temporary file stays behind"


def test_a_key_that_leaves_the_run_directory_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(StorageError, match="leaves the run directory"):
            store.read(key)


def test_concurrent_updates_lose_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def count() -> None:
        for _ in range(25):
            store.update("counter", lambda old: str(int(old or b"0") + 1).encode())

    code = "import sys; from pathlib import Path; from trainer.store import LocalStore\n"
    code += "count = lambda old: str(int(old or 0) + 1).encode()\n"
    code += "for _ in range(25): LocalStore(Path(sys.argv[1])).update('counter', count)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    thread = threading.Thread(target=count)
    thread.start()
    count()
    thread.join()
    assert process.wait() == 0
    assert store.read("counter") == b"75"


def test_a_change_that_raises_leaves_the_object_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("x", b"old")

    def fail(_: bytes | None) -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.update("x", fail)
    assert store.read("x") == b"old"


def test_an_append_is_there_before_the_part_is_closed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.open_part("journal/1/0.jsonl") as part:
        part.append(b"one\n")
        assert store.read("journal/1/0.jsonl") == b"one\n"
        part.append(b"two\n")
    assert store.read("journal/1/0.jsonl") == b"one\ntwo\n"


def test_storage_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = LocalStore(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match=r"not a directory|Not a directory"):
        store.write("run.json", b"{}")
    with pytest.raises(StorageError, match="file"):
        store.probe_parent()


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "run")
    store.probe_parent()
    assert not (tmp_path / "new").exists()
    store.probe()
    assert list(store.root.iterdir()) == []


def test_one_directory_has_one_location_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert LocalStore(tmp_path / "link" / "r").location == LocalStore(tmp_path / "real" / "." / "r").location


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(RefusedError, match="s3://bucket"):
        open_store("s3://bucket/run")
