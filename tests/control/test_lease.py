"""One writer per run: taking, keeping, losing and giving back the lease, on a real directory."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.control.lease import LEASE_KEY, Lease, is_held, read_lease
from trainer.errors import LeaseError, StorageError
from trainer.processes import identify
from trainer.records import LeaseRecord, to_json
from trainer.store import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def held_elsewhere(store: LocalStore, *, renewals: int, lease_seconds: float) -> None:
    """A lease whose holder's process cannot be looked up from here."""
    record = LeaseRecord(
        holder="far",
        renewals=renewals,
        incarnation=4,
        host_name="another-machine",
        process=identify(1),
        lease_seconds=lease_seconds,
    )
    store.write(LEASE_KEY, to_json(record))


def test_a_free_lease_is_taken_and_a_released_one_is_free_again(store: LocalStore) -> None:
    first, second = Lease(store, "a"), Lease(store, "b")
    first.acquire(wait_seconds=0)
    assert is_held(store)
    first.release()
    assert not is_held(store)
    second.acquire(wait_seconds=0)
    assert (record := read_lease(store)) is not None
    assert record.holder == "b"


def test_a_lease_says_what_its_holder_was_started_by(store: LocalStore) -> None:
    lease = Lease(store, "a", started_by="flow-run-1")
    lease.acquire(wait_seconds=0)
    lease.renew()
    with pytest.raises(LeaseError) as refused:
        Lease(store, "b").acquire(wait_seconds=0)
    assert refused.value.started_by == "flow-run-1"


def test_a_living_holder_on_this_machine_is_named_and_not_replaced(store: LocalStore) -> None:
    Lease(store, "a").acquire(wait_seconds=0)
    with pytest.raises(LeaseError, match=r"controller a .*is training this run"):
        Lease(store, "b").acquire(wait_seconds=60)


def test_a_holder_whose_process_is_gone_is_replaced_at_once(store: LocalStore) -> None:
    code = "import sys; from pathlib import Path; from trainer.control.lease import Lease; "
    code += "from trainer.store import LocalStore; Lease(LocalStore(Path(sys.argv[1])), 'dead').acquire(0)"
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=True)
    assert not is_held(store)
    Lease(store, "b").acquire(wait_seconds=0)


def test_a_silent_holder_elsewhere_is_waited_out_and_the_incarnation_goes_on_from_its_own(store: LocalStore) -> None:
    held_elsewhere(store, renewals=7, lease_seconds=0.5)
    said: list[str] = []
    lease = Lease(store, "b")
    lease.acquire(wait_seconds=30, on_wait=said.append)
    assert lease.incarnation == 4
    assert "waiting" in said[0]
    assert (record := read_lease(store)) is not None
    assert (record.holder, record.renewals) == ("b", 8)


def test_a_holder_elsewhere_that_renews_is_not_replaced(store: LocalStore) -> None:
    held_elsewhere(store, renewals=1, lease_seconds=600)
    seen = threading.Event()
    renewing = threading.Thread(
        target=lambda: (seen.wait(), held_elsewhere(store, renewals=2, lease_seconds=600)), daemon=True
    )
    renewing.start()
    with pytest.raises(LeaseError, match="controller far"):
        Lease(store, "b").acquire(wait_seconds=60, on_wait=lambda _: seen.set())
    renewing.join()


def test_whoever_lost_the_lease_learns_it_at_the_next_renewal_and_cannot_give_it_back(store: LocalStore) -> None:
    lease = Lease(store, "a")
    lease.acquire(wait_seconds=0)
    held_elsewhere(store, renewals=99, lease_seconds=10)
    with pytest.raises(LeaseError, match="taken by controller far"):
        lease.renew()
    lease.release()
    assert (record := read_lease(store)) is not None
    assert record.holder == "far"


def test_of_many_that_want_a_free_lease_at_once_exactly_one_gets_it(store: LocalStore) -> None:
    start = threading.Barrier(8)
    outcomes: list[str] = []

    def want(name: str) -> None:
        start.wait()
        try:
            Lease(store, name).acquire(wait_seconds=0)
        except LeaseError:
            outcomes.append("refused")
        else:
            outcomes.append("taken")

    threads = [threading.Thread(target=want, args=(f"c{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["taken"]


def test_the_newest_incarnation_survives_a_change_of_holder(store: LocalStore) -> None:
    first = Lease(store, "a")
    first.acquire(wait_seconds=0)
    first.renew(incarnation=3)
    first.renew()
    first.release()
    second = Lease(store, "b")
    second.acquire(wait_seconds=0)
    assert second.incarnation == 3


def test_an_unreadable_lease_is_a_storage_error_that_says_what_to_do(store: LocalStore) -> None:
    store.write(LEASE_KEY, b"{torn")
    with pytest.raises(StorageError, match=r"lease.json is not readable.*move it away"):
        Lease(store, "a").acquire(wait_seconds=0)


def test_without_a_lease_file_no_incarnation_number_is_used_twice(store: LocalStore) -> None:
    store.write("metrics/7/1.jsonl", b"")
    store.write("checkpoints/12/100/_METADATA", b"")
    lease = Lease(store, "a")
    lease.acquire(wait_seconds=0)
    assert lease.incarnation == 12
