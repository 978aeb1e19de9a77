"""Rolling back: what is abandoned, what is kept, and when it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.test_catalog import held, save
from tests.run_directory_builder import RunDirectoryBuilder
from trainer.control.catalog import Catalog, Retention
from trainer.control.lease import Lease, read_lease
from trainer.control.rollback import RollbackPlan, plan_rollback, roll_back
from trainer.errors import LeaseError, RefusedError, StorageError
from trainer.history import RunHistory
from trainer.records import RollbackRecord, RolledBack, RunOpened
from trainer.store import LocalStore, checkpoint_path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run of two incarnations with commits at 10, 20 (by 1) and 30, 40 (by 2) that nobody trains."""
    run = RunDirectoryBuilder(tmp_path / "run", steps=40)
    run.open()
    run.start_group(1)
    run.train(20)
    run.start_group(1, from_step=20)
    run.train(40)
    run.end("complete", cause="completed")
    for incarnation, step in [(1, 10), (1, 20), (2, 30), (2, 40)]:
        commit(run.store, incarnation, step)
    return run.store


def commit(store: LocalStore, incarnation: int, step: int) -> None:
    save(store, step, incarnation, files={"_METADATA": b"m"})
    Catalog(store).commit(incarnation, step, still_ours=held)


def listed(store: LocalStore) -> list[tuple[int, int]]:
    return [(record.step, record.incarnation) for record in Catalog(store).commits()]


# --- the catalog ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    plays=st.lists(
        st.tuples(st.just("train"), st.integers(0, 4)) | st.tuples(st.just("roll back"), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    )
)
def test_the_commits_are_those_of_the_current_line_however_often_it_was_rolled_back(
    tmp_path_factory: pytest.TempPathFactory, plays: list[tuple[str, int]]
) -> None:
    """Each `train` is an incarnation with so many commits, each `roll back` goes to a step so many commits back."""
    store = LocalStore(tmp_path_factory.mktemp("run"))
    catalog = Catalog(store)
    line: list[tuple[int, int]] = []
    written = 0
    incarnation = 0
    for what, number in plays:
        if what == "train":
            incarnation += 1
            for _ in range(number):
                line.append((line[-1][0] + 1 if line else 1, incarnation))
                commit(store, incarnation, line[-1][0])
                written += 1
        elif number < len(line):
            kept = line[: len(line) - number]
            catalog.roll_back(
                RollbackRecord(
                    to_step=kept[-1][0], from_step=line[-1][0], after_incarnation=incarnation, reason="", time=0.0
                )
            )
            line = kept
        assert listed(store) == line[::-1]
        usable = next((record for record, problem in catalog.newest_usable() if problem is None), None)
        assert (usable and (usable.step, usable.incarnation)) == (line[-1] if line else None)
        assert [(c.step, c.incarnation) for c in RunHistory.load(store).commits] == line
    assert len(store.names("commits")) == written, "nothing is deleted"


def test_retention_counts_the_new_line_and_leaves_what_was_abandoned_alone(store: LocalStore) -> None:
    roll_back(store, plan_rollback(store, 20))
    commit(store, 3, 30)
    catalog = Catalog(store)
    for record in catalog.expired(Retention(keep_last_n=2, keep_every=None)):
        catalog.delete(record)
    assert listed(store) == [(30, 3), (20, 1)]
    assert store.files(checkpoint_path(2, 30))
    assert store.files(checkpoint_path(2, 40))
    assert store.names("commits") == ["20.1.json", "30.2.json", "30.3.json", "40.2.json"]


def test_a_rollback_that_cannot_be_read_stops_everything_that_chooses(store: LocalStore) -> None:
    roll_back(store, plan_rollback(store, 20))
    store.path("rollbacks/1.json").write_bytes(b'{"to_step": 20')
    with pytest.raises(StorageError, match=r"rollbacks/1\.json cannot be read"):
        Catalog(store).commits()
    assert any("rollbacks/1.json" in problem for problem in RunHistory.load(store).problems)


# --- looking and doing ------------------------------------------------------------------------------------------------


def test_a_rollback_is_recorded_and_told_and_the_lease_given_back(store: LocalStore) -> None:
    plan = plan_rollback(store, 20)
    assert ([c.step for c in plan.abandoned_commits], plan.abandoned_steps) == ([40, 30], 20)
    record = roll_back(store, plan, "the loss\nwent up")
    assert (record.to_step, record.from_step, record.after_incarnation) == (20, 40, 2)
    history = RunHistory.load(store)
    assert history.rollbacks == (record,)
    assert isinstance(history.events[-1], RolledBack)
    assert (history.step, history.state, history.total_steps) == (20, "stopped", 40)
    assert history.message == "rolled back from step 40 to step 20: the loss went up"
    assert [step.step for step in history.abandoned] == list(range(21, 41))
    lease = read_lease(store)
    assert lease is not None
    assert lease.holder is None

    # Once more: the second record stands beside the first.
    roll_back(store, plan_rollback(store, None))
    assert [r.to_step for r in Catalog(store).rollbacks()] == [20, 10]
    assert listed(store) == [(10, 1)]


@pytest.mark.parametrize("step", [15, 25, 50])
def test_only_committed_steps_can_be_rolled_back_to_and_the_others_are_told(store: LocalStore, step: int) -> None:
    with pytest.raises(RefusedError, match=f"to step {step}; committed steps: 10, 20, 30, 40"):
        plan_rollback(store, step)


def test_abandoned_steps_cannot_be_rolled_back_to(store: LocalStore) -> None:
    roll_back(store, plan_rollback(store, 20))
    with pytest.raises(RefusedError, match=r"to step 30; committed steps: 10, 20$"):
        plan_rollback(store, 30)


def test_a_damaged_checkpoint_cannot_be_rolled_back_to(store: LocalStore) -> None:
    store.path(f"{checkpoint_path(1, 20)}/_METADATA").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"damaged \(checkpoints/1/20: _METADATA has crc32c"):
        plan_rollback(store, 20)


def test_the_newest_step_leaves_nothing_to_do(store: LocalStore) -> None:
    plan = plan_rollback(store, 40)
    assert plan.abandoned_commits == ()
    assert plan.summary() == "step 40 is the newest committed step already; there is nothing to abandon"


def test_without_a_step_it_is_the_newest_but_one_and_there_must_be_one(store: LocalStore) -> None:
    assert plan_rollback(store, None).to_step == 30
    roll_back(store, plan_rollback(store, 10))
    with pytest.raises(RefusedError, match="no committed step before its newest one; committed steps: 10"):
        plan_rollback(store, None)


def test_a_run_that_is_being_trained_is_not_rolled_back(store: LocalStore) -> None:
    plan = plan_rollback(store, 20)
    lease = Lease(store, "controller-2")
    lease.acquire(wait_seconds=1.0)
    with pytest.raises(LeaseError, match=r"controller-2 .* is training this run; stop it first"):
        roll_back(store, plan)
    assert store.names("rollbacks") == []
    lease.renew()  # still theirs


@pytest.mark.parametrize("change", ["trained on", "rolled back", "target deleted"])
def test_what_was_looked_at_must_still_hold(store: LocalStore, change: str) -> None:
    plan: RollbackPlan = plan_rollback(store, 20)
    match change:
        case "trained on":
            commit(store, 3, 50)
        case "rolled back":
            roll_back(store, plan_rollback(store, 30))
        case "target deleted":
            Catalog(store).delete(plan.target)
    before = store.names("rollbacks")
    with pytest.raises(RefusedError, match="has changed since it was looked at"):
        roll_back(store, plan)
    assert store.names("rollbacks") == before


def test_the_next_incarnation_continues_the_line(store: LocalStore) -> None:
    roll_back(store, plan_rollback(store, 20))
    run = RunDirectoryBuilder(store.root, steps=40)
    run.incarnation = 2
    run.open(resumed=True)
    run.start_group(1, from_step=20)
    run.train(35)
    history = RunHistory.load(store)
    assert (history.step, history.state) == (35, "dead")
    assert [step.incarnation for step in history.steps] == [1] * 20 + [3] * 15
    assert len(history.abandoned) == 20
    assert sum(isinstance(event, RunOpened) for event in history.events) == 2
