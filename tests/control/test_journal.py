"""The journal: what is written reads back, and whoever listens cannot harm it."""

from __future__ import annotations

import math
from pathlib import Path

from trainer import records
from trainer.control.journal import Journal, listening
from trainer.errors import StorageError
from trainer.history import RunHistory
from trainer.records import Event, MetricsRecord
from trainer.store import LocalStore


def fail(error: StorageError) -> None:
    raise AssertionError(f"the storage failed: {error}")


def metrics(step: int, loss: float = 1.0) -> MetricsRecord:
    return MetricsRecord(
        step=step, loss=loss, learning_rate=0.1, samples=1, tokens=1, sample_digest="0" * 16, step_seconds=0.1
    )


def test_events_and_metrics_of_two_controllers_read_back_in_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for controller in ("a", "b"):
        journal = Journal(store, controller, on_trouble=fail)
        journal.begin_incarnation(1)
        journal.record(records.StopRequested, reason=controller)
        journal.close()
    history = RunHistory.load(store)
    assert [
        (event.controller, event.reason) for event in history.events if isinstance(event, records.StopRequested)
    ] == [
        ("a", "a"),
        ("b", "b"),
    ]
    assert not history.problems
    assert store.names("journal/1") == ["0.jsonl", "1.jsonl"], "nothing is appended to another controller's part"


def test_a_loss_that_is_not_finite_reads_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    journal = Journal(store, "a", on_trouble=fail)
    journal.begin_incarnation(1)
    journal.record_metrics((metrics(1, math.nan), metrics(2, math.inf)))
    journal.close()
    losses = [line.loss for line in RunHistory.load(store).metrics]
    assert math.isnan(losses[0])
    assert math.isinf(losses[1])


def test_a_listener_hears_all_until_it_fails_and_the_journal_goes_on(tmp_path: Path) -> None:
    heard: list[Event | MetricsRecord] = []

    def listener(item: Event | MetricsRecord) -> None:
        heard.append(item)
        if len(heard) == 2:
            raise ValueError("the terminal is gone")

    store = LocalStore(tmp_path)
    with listening(listener):
        journal = Journal(store, "a", on_trouble=fail)
    journal.begin_incarnation(1)
    for step in range(1, 5):
        journal.record_metrics((metrics(step),))
    journal.close()
    assert [item.step for item in heard if isinstance(item, MetricsRecord)] == [1, 2]
    assert [line.step for line in RunHistory.load(store).metrics] == [1, 2, 3, 4]


def test_every_listener_of_nested_blocks_hears_all_even_if_another_fails(tmp_path: Path) -> None:
    outer: list[Event | MetricsRecord] = []
    inner: list[Event | MetricsRecord] = []

    def failing(item: Event | MetricsRecord) -> None:
        raise ValueError("the page is gone")

    with listening(outer.append), listening(failing), listening(inner.append):
        journal = Journal(LocalStore(tmp_path), "a", on_trouble=fail)
    journal.record_metrics((metrics(1), metrics(2)))
    unheard = Journal(LocalStore(tmp_path), "b", on_trouble=fail)
    unheard.record_metrics((metrics(3),))
    assert outer == inner == [metrics(1), metrics(2)]


def test_trouble_with_the_storage_is_reported_and_not_raised(tmp_path: Path) -> None:
    trouble: list[StorageError] = []
    journal = Journal(LocalStore(tmp_path), "a", on_trouble=trouble.append)
    (tmp_path / "journal").write_text("a file in the way")
    (tmp_path / "metrics").write_text("a file in the way")
    journal.record(records.StopRequested, reason="test")
    journal.record_metrics((metrics(1),))
    assert len(trouble) == 2
