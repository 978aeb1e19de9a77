"""Which events a run tells, and that their number is bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tasks import events
from tasks.events import RunEvents
from tests.test_progress import metrics, opened, stamp, starting
from trainer.progress import LiveProgress
from trainer.records import CapacityChanged, CheckpointCommitted, Incident, JournalEvent, MetricsRecord, Waiting


class Run:
    """A journal that is heard, and asked what is to be told."""

    def __init__(self) -> None:
        self.progress = LiveProgress(100)
        self.events = RunEvents()

    def happens(self, *items: JournalEvent | MetricsRecord) -> None:
        for item in items:
            self.progress.update(item)
            self.events.hear(item)

    def told(self, at: float) -> list[str]:
        return [event.name for event in self.events.due(self.progress.look(at), at)]


def waiting() -> Waiting:
    return Waiting(**stamp(1.0), usable=0, needed=1, reason="no hosts")


def committed(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(**stamp(1.0), step=step, nbytes=1, save_seconds=0.1, verify_seconds=0.1)


def incident() -> Incident:
    facts = {"cause": "host_lost", "host_ids": ("host-2",), "message": "host-2 lost", "detected_seconds": 0.1}
    return Incident(**stamp(1.0), **facts, step=7, alive=3, total=4)


def test_nothing_is_told_before_the_run_is_opened() -> None:
    run = Run()
    assert run.told(0.0) == []
    assert run.events.ended(run.progress.look(0.0)) == [], "somebody else may be training it"


def test_the_story_of_a_run() -> None:
    run = Run()
    run.happens(opened())
    assert run.told(1.0) == [events.STARTED]
    run.happens(starting(4, at=1.0), metrics(1), committed(10))
    assert run.told(2.0) == [events.PROGRESS]
    run.happens(incident(), incident())
    assert run.told(3.0) == [events.INCIDENT, events.INCIDENT]
    run.happens(waiting())
    assert run.told(4.0) == [events.WAITING]
    assert run.told(5.0) == []
    run.happens(starting(4, at=6.0), metrics(2))
    assert run.told(6.0) == [events.RESUMED]
    (ended,) = run.events.ended(run.progress.look(7.0))
    assert (ended.name, ended.payload["step"]) == (events.ENDED, 2)


def test_of_many_changes_of_capacity_the_newest_is_told() -> None:
    run = Run()
    run.happens(opened())
    run.told(1.0)
    run.happens(*(CapacityChanged(**stamp(1.0), offered=hosts, usable=1, source="trace") for hosts in (4, 0, 3)))
    (told,) = run.events.due(run.progress.look(2.0), 2.0)
    assert (told.name, told.payload["offered"], told.payload["source"]) == (events.CAPACITY_CHANGED, 3, "trace")
    assert run.told(3.0) == []


def test_the_commit_that_a_run_was_continued_from_is_no_progress() -> None:
    run = Run()
    run.happens(opened(newest_commit=20))
    assert run.told(1.0) == [events.STARTED]
    run.happens(committed(30))
    assert run.told(2.0) == [events.PROGRESS]


def test_goodput_is_told_as_a_whole_percentage_after_the_start_up_and_once_a_minute() -> None:
    run = Run()
    run.happens(opened(), starting(4, at=1.0), *(metrics(step, step_seconds=3.0) for step in range(1, 101)))
    assert events.GOODPUT not in run.told(events.GOODPUT_FROM_SECONDS - 1)
    (event,) = run.events.due(run.progress.look(600.0), 600.0)
    assert (event.name, event.labels) == (events.GOODPUT, {events.GOODPUT_LABEL: "50"})
    assert run.told(600.0 + events.GOODPUT_INTERVAL_SECONDS - 1) == []
    assert run.told(600.0 + events.GOODPUT_INTERVAL_SECONDS) == [events.GOODPUT]


@given(st.lists(st.sampled_from([incident(), waiting(), metrics(5), starting(4, at=1.0)]), max_size=60))
def test_what_is_told_at_once_is_bounded(items: list[JournalEvent | MetricsRecord]) -> None:
    run = Run()
    run.happens(opened(), *items)
    told = Counter(run.told(1.0))
    assert told[events.INCIDENT] == min(20, items.count(incident()))
    assert sum(told.values()) <= 24
    assert run.told(1.0) == []


def test_commits_in_quick_succession_are_one_progress_of_the_newest() -> None:
    run = Run()
    run.happens(opened())
    run.told(0.0)
    told = []
    for second in range(1, 61):
        run.happens(committed(second))
        told += run.events.due(run.progress.look(second), second)
    assert len(told) == 6
    assert told[-1].payload["committed_step"] == 51
