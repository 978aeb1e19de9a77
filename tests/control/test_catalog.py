"""Which checkpoints may be used, and which are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.control.catalog import Catalog, Retention
from trainer.errors import LeaseError, StorageError
from trainer.records import CommitRecord
from trainer.store import LocalStore, checkpoint_path

FILES = {"_METADATA": b"meta", "d/0": b"x" * 1000, "d/1": b"y" * 7}


def save(store: LocalStore, step: int, incarnation: int = 1, files: dict[str, bytes] = FILES) -> None:
    for name, data in files.items():
        store.write(f"{checkpoint_path(incarnation, step)}/{name}", data)


def held() -> None:
    """The lease is ours."""


def usable(catalog: Catalog) -> CommitRecord | None:
    return next((record for record, problem in catalog.newest_usable() if problem is None), None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_checkpoint_is_usable_only_once_it_is_committed(store: LocalStore) -> None:
    catalog = Catalog(store)
    save(store, 10)
    assert usable(catalog) is None
    record = catalog.commit(1, 10, still_ours=held)
    assert usable(catalog) == record
    assert {file.path: file.size for file in record.files} == {name: len(data) for name, data in FILES.items()}


def test_what_orbax_did_not_finish_cannot_be_committed(store: LocalStore) -> None:
    save(store, 10, files={"d/0": b"x"})
    with pytest.raises(StorageError, match="not a finished checkpoint"):
        Catalog(store).commit(1, 10, still_ours=held)
    with pytest.raises(StorageError):
        Catalog(store).commit(1, 20, still_ours=held)  # never written at all


@pytest.mark.parametrize("name", list(FILES))
@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
def test_any_damage_to_any_file_is_found_and_the_next_older_checkpoint_is_used(
    store: LocalStore, name: str, damage: str
) -> None:
    catalog = Catalog(store)
    for step in (9, 10):
        save(store, step)
        catalog.commit(1, step, still_ours=held)
    path = store.path(f"{checkpoint_path(1, 10)}/{name}")
    data = path.read_bytes()
    match damage:
        case "truncate":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "flip":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "remove":
            path.unlink()
    candidates = list(catalog.newest_usable())
    assert [(record.step, problem is None) for record, problem in candidates] == [(10, False), (9, True)]
    assert name in str(candidates[0][1])


def test_a_file_that_cannot_be_read_counts_as_damage(store: LocalStore) -> None:
    catalog = Catalog(store)
    for step in (9, 10):
        save(store, step)
        catalog.commit(1, step, still_ours=held)
    path = store.path(f"{checkpoint_path(1, 10)}/d/0")
    path.unlink()
    path.symlink_to("/proc/self/mem")  # there, of another size; reading it fails even for root
    candidates = list(catalog.newest_usable())
    assert [(record.step, problem is None) for record, problem in candidates] == [(10, False), (9, True)]


def test_whoever_lost_the_lease_while_reading_commits_nothing(store: LocalStore) -> None:
    def lost() -> None:
        raise LeaseError("taken by another")

    save(store, 10)
    with pytest.raises(LeaseError):
        Catalog(store).commit(1, 10, still_ours=lost)
    assert Catalog(store).commits() == []


def test_a_quarantined_checkpoint_is_never_offered_again_and_keeps_its_data(store: LocalStore) -> None:
    catalog = Catalog(store)
    for step in (9, 10):
        save(store, step)
        catalog.commit(1, step, still_ours=held)
    newest = catalog.commits()[0]
    catalog.quarantine(newest, "tested")
    assert [record.step for record in catalog.commits()] == [9]
    assert store.files(newest.path), "set aside is not deleted"


def test_steps_and_incarnations_are_ordered_as_numbers(store: LocalStore) -> None:
    catalog = Catalog(store)
    for incarnation, step in [(1, 9), (2, 10), (10, 10), (1, 1000), (2, 99)]:
        save(store, step, incarnation)
        catalog.commit(incarnation, step, still_ours=held)
    assert [(r.step, r.incarnation) for r in catalog.commits()] == [(1000, 1), (99, 2), (10, 10), (10, 2), (9, 1)]


def test_torn_and_foreign_names_among_the_commits_are_no_commits(store: LocalStore) -> None:
    catalog = Catalog(store)
    save(store, 5)
    catalog.commit(1, 5, still_ours=held)
    store.write("commits/7.1.json", b'{"step": 7,')
    store.write("commits/12.bak", b"{}")
    store.write("commits/.DS_Store", b"")
    assert [record.step for record in catalog.commits()] == [5]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    steps=st.sets(st.integers(1, 60), min_size=1, max_size=12),
    keep_last_n=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 20),
)
def test_retention_keeps_the_newest_and_the_multiples_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep_last_n: int, keep_every: int | None
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    catalog = Catalog(store)
    for step in steps:
        save(store, step, files={"_METADATA": b"m"})
        catalog.commit(1, step, still_ours=held)
    for record in catalog.expired(Retention(keep_last_n=keep_last_n, keep_every=keep_every)):
        catalog.delete(record)
    newest = set(sorted(steps)[-keep_last_n:])
    multiples = {step for step in steps if keep_every is not None and step % keep_every == 0}
    assert {record.step for record in catalog.commits()} == newest | multiples
    assert set(store.names("checkpoints/1")) == {str(step) for step in newest | multiples}
