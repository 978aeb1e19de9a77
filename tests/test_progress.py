"""What a living run says of itself at each moment, from its events alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run_directory_builder import START, RunDirectoryBuilder, play_disturbed_run, topology_of
from trainer.history import RunHistory
from trainer.progress import LiveProgress
from trainer.records import GroupEnded, GroupStarting, JournalEvent, MetricsRecord, RunOpened, StopRequested, Waiting


def played_back(run: RunDirectoryBuilder) -> Iterator[tuple[float, JournalEvent | MetricsRecord]]:
    """Everything a listener would have heard, each with its monotonic time."""
    history = RunHistory.load(run.store)
    heard: list[tuple[float, JournalEvent | MetricsRecord]] = [(event.monotonic, event) for event in history.events]
    for step in (*history.steps, *history.abandoned):
        assert step.ended is not None
        heard.append((step.ended - START, step.record))
    yield from sorted(heard, key=lambda pair: pair[0])


def stamp(monotonic: float) -> dict[str, float]:
    return {"time": START + monotonic, "monotonic": monotonic, "incarnation": 1}


def metrics(step: int, *, step_seconds: float = 0.5, loss: float = 2.0) -> MetricsRecord:
    return MetricsRecord(
        step=step,
        loss=loss,
        learning_rate=0.1,
        samples=16,
        tokens=1000,
        sample_digest="0" * 16,
        step_seconds=step_seconds,
    )


def opened(*, newest_commit: int | None = None, steps: int = 100) -> RunOpened:
    return RunOpened(**stamp(0.0), resumed=newest_commit is not None, newest_commit=newest_commit, steps=steps)


def starting(num_hosts: int, *, at: float, cause: str = "start") -> GroupStarting:
    hosts = tuple(f"host-{index}" for index in range(num_hosts))
    return GroupStarting(**stamp(at), cause=cause, topology=topology_of(hosts))


def test_a_disturbed_run_is_told_from_its_start_to_its_end(tmp_path: Path) -> None:
    progress = LiveProgress(300)
    activities, views = [], {}
    for monotonic, item in played_back(play_disturbed_run(tmp_path / "run")):
        progress.update(item)
        view = progress.look(monotonic)
        if not activities or activities[-1] != view.activity:
            activities.append(view.activity)
        views[view.step] = view
    assert activities == [
        *("starting", "training"),
        *("recovering", "resizing", "training"),
        *("resizing", "training"),
        *("recovering", "resizing", "training"),
        "complete",
    ]
    last = views[300]
    assert (last.step, last.steps, last.committed_step, last.seconds_left) == (300, 300, 300, 0.0)
    assert views[110].topology is not None
    assert views[110].topology.num_processes == 3
    history = RunHistory.load(play_disturbed_run(tmp_path / "again").store)
    assert history.goodput.fraction is not None
    assert last.goodput == pytest.approx(history.goodput.fraction, abs=0.1)


def test_rates_are_those_of_the_newest_group_without_its_first_step() -> None:
    progress = LiveProgress(100)
    for item in (opened(), starting(4, at=1.0), metrics(1, step_seconds=9.0)):
        progress.update(item)
    assert progress.look(10.0).tokens_per_second is None
    progress.update(metrics(2, step_seconds=0.5))
    view = progress.look(11.0)
    assert (view.step_seconds, view.tokens_per_second, view.seconds_left) == (0.5, 2000.0, 49.0)
    progress.update(starting(2, at=12.0, cause="host_lost"))
    assert progress.look(13.0).tokens_per_second is None


def test_steps_that_are_trained_again_are_counted_once() -> None:
    progress = LiveProgress(100)
    progress.update(opened())
    for step in (1, 2, 3, 4, 3, 4, 5):
        progress.update(metrics(step, step_seconds=1.0))
    assert progress.look(10.0).goodput == 0.5


def test_a_continued_run_begins_at_its_commit() -> None:
    progress = LiveProgress(100)
    progress.update(opened(newest_commit=40))
    view = progress.look(1.0)
    assert (view.activity, view.step, view.committed_step) == ("starting", 40, 40)


def test_a_run_that_waits_has_neither_hosts_nor_speed() -> None:
    progress = LiveProgress(100)
    for item in (
        opened(),
        starting(4, at=1.0),
        metrics(1),
        metrics(2),
        GroupEnded(**stamp(3.0), cause="drained", step=2),
    ):
        progress.update(item)
    assert progress.look(3.0).activity == "resizing"
    progress.update(Waiting(**stamp(3.0), usable=0, needed=1, reason="0 of 1"))
    view = progress.look(4.0)
    assert (view.activity, view.detail, view.topology, view.tokens_per_second) == (
        *("waiting for capacity", "0 of 1"),
        *(None, None),
    )
    progress.update(starting(4, at=5.0, cause="drained"))
    assert progress.look(5.0).activity == "resizing"


def test_what_happens_on_the_way_to_a_stop_does_not_hide_it() -> None:
    progress = LiveProgress(100)
    for item in (opened(), metrics(1), StopRequested(**stamp(1.0), reason="SIGTERM"), metrics(2)):
        progress.update(item)
    view = progress.look(2.0)
    assert (view.activity, view.detail, view.step) == ("stopping", "SIGTERM", 2)


@given(
    steps=st.lists(
        st.builds(metrics, st.integers(1, 100), step_seconds=st.floats(0, 1e6), loss=st.floats()), max_size=80
    ),
    now=st.floats(0, 1e9),
)
def test_figures_stay_in_their_range_whatever_is_heard(steps: list[MetricsRecord], now: float) -> None:
    progress = LiveProgress(100)
    progress.update(opened())
    for step in steps:
        progress.update(step)
    view = progress.look(now)
    assert view.step == (steps[-1].step if steps else 0)
    assert view.goodput is None or 0 <= view.goodput <= 1
    assert view.seconds_left is None or view.seconds_left >= 0
    assert view.tokens_per_second is None or view.tokens_per_second > 0
