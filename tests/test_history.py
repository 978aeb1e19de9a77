"""What can be read from a run directory, whole or damaged."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run_directory_builder import PHASES, START, RunDirectoryBuilder, play_disturbed_run
from trainer.history import RunHistory, TrainedStep, current_line, deaths_without_progress
from trainer.planning.goodput import Kind
from trainer.records import (
    CheckpointCommitted,
    CommitRecord,
    FileRecord,
    JournalEvent,
    MetricsRecord,
    RolledBack,
    RunEnded,
    RunOpened,
    StopRequested,
    to_json,
)
from trainer.store import LocalStore

# Of a start, what has no kind of its own.
START_SECONDS = PHASES["import"] + PHASES["trace"] + PHASES["compile"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectoryBuilder:
    return RunDirectoryBuilder(tmp_path / "quickstart", steps=20)


def trained_step(step: int, incarnation: int) -> TrainedStep:
    record = MetricsRecord(
        step=step, loss=1, learning_rate=1, samples=1, tokens=1, sample_digest="0" * 16, step_seconds=1
    )
    return TrainedStep(record, incarnation, None)


def pairs(steps: Iterable[TrainedStep]) -> list[tuple[int, int]]:
    return [(step.incarnation, step.step) for step in steps]


# (step it starts after, steps it trains) of each incarnation
INCARNATIONS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12)


@given(incarnations=INCARNATIONS)
def test_the_current_line_holds_what_no_later_incarnation_starts_below(incarnations: list[tuple[int, int]]) -> None:
    trained = {
        number: [trained_step(step, number) for step in range(after + 1, after + count + 1)]
        for number, (after, count) in enumerate(incarnations, start=1)
    }
    starts = {number: after for number, (after, _) in enumerate(incarnations, start=1)}
    line, abandoned = current_line(trained, {number: after + 1 for number, after in starts.items()})

    all_steps = [(number, step.step) for number, steps in trained.items() for step in steps]
    visible = [
        (number, step) for number, step in all_steps if all(starts[later] >= step for later in starts if later > number)
    ]
    assert pairs(line) == sorted(visible, key=lambda pair: pair[1])
    assert sorted(pairs(abandoned)) == sorted(set(all_steps) - set(visible))


@settings(max_examples=15, deadline=None)
@given(incarnations=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=9, max_size=12))
def test_the_current_line_is_read_from_disk_in_numeric_order(
    incarnations: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """More than nine incarnations, because text order puts 10 before 2."""
    store = LocalStore(tmp_path_factory.mktemp("run"))
    model: dict[int, int] = {}
    for number, (after, count) in enumerate(incarnations, start=1):
        model = {step: writer for step, writer in model.items() if step <= after}
        for step in range(after + 1, after + count + 1):
            model[step] = number
            with store.open_part(f"metrics/{number}/{after + 1}.jsonl") as part:
                part.append(to_json(trained_step(step, number).record))
    history = RunHistory.load(store)
    assert {step.step: step.incarnation for step in history.steps} == model
    assert len(history.steps) + len(history.abandoned) == sum(count for _, count in incarnations)


def test_events_are_in_the_order_of_incarnations_and_parts_not_of_their_names(run: RunDirectoryBuilder) -> None:
    """Text order puts 10 before 2. Clocks decide nothing: those of two controllers may differ."""
    for part in range(12):
        stamp = run.stamp() | {"time": START - part}
        event = StopRequested(**stamp, reason=f"part {part}")
        run.store.write(f"journal/9/{part}.jsonl", to_json(event))
        run.store.write(f"journal/10/{part}.jsonl", to_json(event.model_copy(update={"reason": f"later {part}"})))
    reasons = [event.reason for event in RunHistory.load(run.store).events if isinstance(event, StopRequested)]
    assert reasons == [f"part {part}" for part in range(12)] + [f"later {part}" for part in range(12)]


def test_parts_of_one_incarnation_are_joined(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(9)
    run.train(11)
    run.train(12)
    history = RunHistory.load(run.store)
    assert [record.step for record in history.metrics] == list(range(1, 13))
    assert history.abandoned == ()


def test_an_empty_directory_gives_an_empty_history(tmp_path: Path) -> None:
    history = RunHistory.load(LocalStore(tmp_path / "nothing"))
    assert (history.run, history.steps, history.state, history.step) == (None, (), "dead", 0)
    assert history.goodput.fraction is None
    assert history.problems == ()


def test_a_moved_directory_says_the_same(tmp_path: Path) -> None:
    built = play_disturbed_run(tmp_path / "here")
    before = RunHistory.load(built.store)
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = RunHistory.load(LocalStore(tmp_path / "there"))
    assert after == dataclasses.replace(before, location=str(tmp_path / "there"))
    assert before.step == 300


# --- states


def test_a_run_without_an_end_is_dead_unless_its_controller_is_known_to_live(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(5)
    assert RunHistory.load(run.store).state == "dead"
    living = RunHistory.load(run.store, living_at=run.clock + 3)
    assert (living.state, living.ended) == ("running", run.clock + 3)


def test_a_living_run_waits_until_the_next_group_starts(run: RunDirectoryBuilder) -> None:
    run.open()
    run.wait_for_capacity(8)
    waiting = RunHistory.load(run.store, living_at=run.clock)
    assert (waiting.state, waiting.message) == ("waiting", "0 of at least 1 hosts are usable")
    assert waiting.goodput.seconds[Kind.WAITING_FOR_CAPACITY] == 8
    run.start_group(1)
    assert RunHistory.load(run.store, living_at=run.clock).state == "running"


@pytest.mark.parametrize("living_at", [None, START + 100])
def test_an_ended_run_keeps_its_outcome_whoever_is_there(run: RunDirectoryBuilder, living_at: float | None) -> None:
    run.open()
    run.end("failed", cause="user_error", message="ZeroDivisionError: division by zero")
    history = RunHistory.load(run.store, living_at=living_at)
    assert (history.state, history.message) == ("failed", "ZeroDivisionError: division by zero")


def test_a_resumed_run_is_no_longer_stopped(run: RunDirectoryBuilder) -> None:
    run.open()
    run.end("stopped", cause="stopped")
    assert RunHistory.load(run.store).state == "stopped"
    run.open(resumed=True)
    assert RunHistory.load(run.store, living_at=run.clock).state == "running"


# --- incidents


def test_incidents_are_paired_with_their_recovery_and_planned_resizes_are_listed_among_them(tmp_path: Path) -> None:
    lost, grown, lost_again = RunHistory.load(play_disturbed_run(tmp_path / "run").store).incidents
    assert (lost.index, lost.planned, lost.cause, lost.hosts) == (1, False, "host_lost", ("host-2",))
    assert (lost.step, lost.resumed_from, lost.steps_lost, lost.from_hosts, lost.to_hosts) == (118, 100, 18, 4, 3)
    assert lost.down_seconds is not None
    assert lost.recovered == pytest.approx(lost.down_since + lost.down_seconds)
    assert lost.phases["compile"] == 0.5
    assert lost.message == "the agent of host-2 closed its connection"
    assert (grown.index, grown.planned, grown.steps_lost, grown.title) == (2, True, 0, "grow 3→4")
    assert (lost_again.index, lost_again.title, lost_again.resumed_from) == (3, "host-1 lost", 200)


def test_an_incident_during_a_recovery_is_part_of_the_first_one(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(3)
    run.train(10)
    run.lose_host("host-2")
    run.start_group(2, cause="host_lost", reach_step=False)
    run.lose_host("host-1")
    run.continue_on(1, cause="host_lost", planned=False, from_step=0)
    first, second = RunHistory.load(run.store).incidents
    assert first.recovered == run.clock
    assert (second.part_of, second.recovered, second.down_seconds) == (first.index, None, None)


def test_an_incident_that_nothing_followed_is_not_recovered(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    stood_still = run.clock
    run.clock += 2  # into the next step
    run.lose_host("host-1")
    (incident,) = RunHistory.load(run.store).incidents
    assert (incident.recovered, incident.steps_lost, incident.part_of) == (None, None, None)
    assert incident.down_since == stood_still


def test_a_first_step_stands_in_for_a_lost_recovery_record(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    stood_still = run.clock
    run.lose_host("host-1")
    run.start_group(1, cause="host_lost", from_step=8)
    run.train(9)
    first_step_ended = run.clock
    run.train(12)
    run.lose_host("host-0")
    first, second = RunHistory.load(run.store).incidents
    assert (first.steps_lost, first.to_hosts, first.down_seconds) == (2, 1, first_step_ended - stood_still)
    assert second.part_of is None


def test_a_lost_controller_is_an_incident_and_its_absence_is_recovery_time(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    stood_still = run.clock
    run.lose_controller(seconds=32)
    run.start_group(2, from_step=8)
    run.train(12)
    history = RunHistory.load(run.store)
    (incident,) = history.incidents
    assert (incident.cause, incident.step, incident.steps_lost) == ("controller_lost", 10, 2)
    assert incident.down_since == stood_still
    assert history.goodput.seconds[Kind.INFRASTRUCTURE_RECOVERY] == 32.5 + START_SECONDS
    assert history.goodput.seconds[Kind.WASTED_PROGRESS] == 1


def test_a_controller_lost_before_any_group_interrupted_nothing(run: RunDirectoryBuilder) -> None:
    run.open()
    run.lose_controller(seconds=4)
    run.start_group(2)
    run.train(3)
    assert RunHistory.load(run.store).incidents == ()


def test_a_failed_start_after_a_planned_end_is_one_incident_since_that_end(run: RunDirectoryBuilder) -> None:
    """The save of the planned end failed as well, so that the run falls back further than the failed group began."""
    run.open()
    run.start_group(2)
    run.train(10)
    stood_still = run.clock
    run.end_group("drained")
    run.start_group(3, cause="drained", from_step=8, reach_step=False)
    run.lose_host("host-2")
    run.start_group(2, cause="host_lost", from_step=8)
    run.train(9)
    run.recovered(
        cause="drained", planned=False, from_hosts=2, step=10, resumed_from=8, down_seconds=run.clock - stood_still
    )
    (incident,) = RunHistory.load(run.store).incidents
    assert (incident.planned, incident.cause, incident.step, incident.steps_lost) == (False, "host_lost", 10, 2)
    assert incident.down_since == stood_still


def test_a_resume_after_an_end_is_no_incident_and_the_stop_is_not_counted(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.end_group("stopped")
    run.end("stopped", cause="stopped")
    run.clock += 1000
    run.open(resumed=True)
    run.start_group(2, from_step=10)
    run.train(20)
    history = RunHistory.load(run.store)
    assert history.incidents == ()
    assert history.goodput.seconds[Kind.STOPPED] == 1000
    assert history.goodput.running_seconds == run.clock - START - 1000


# --- goodput


def test_goodput_of_a_quiet_run_is_itemised_to_the_second(run: RunDirectoryBuilder) -> None:
    run.open()  # 0.5 s
    run.start_group(2)  # PHASES; the restore phase initializes the state, which is no restoring
    run.train(20)  # 20 x 0.5 s
    run.checkpoint(blocking_seconds=0.125)
    run.end_group("completed")  # 0.25 s until saved, 0.25 s after
    run.end("complete", cause="completed")
    goodput = RunHistory.load(run.store).goodput
    assert goodput.seconds[Kind.PRODUCTIVE_STEP] == 10 - 0.125
    assert goodput.badput == {
        Kind.PROGRAM_STARTUP: 0.5 + 0.25 + 0.25 + 0.25 + 0.5,
        Kind.ACCELERATOR_INITIALIZATION: 0.25,
        Kind.DATA_LOADING: 0.125,
        Kind.CHECKPOINT_SAVING: 0.125 + 0.25,
        Kind.OTHER: 0.25,
    }
    assert goodput.elapsed_seconds == run.clock - START


def test_goodput_itemises_what_a_lost_host_costs(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.lose_host("host-1", detected_seconds=1.0)  # then 0.25 s to stop, 0.25 s to plan
    run.continue_on(1, cause="host_lost", planned=False, from_step=6)
    run.train(20)
    seconds = RunHistory.load(run.store).goodput.seconds
    assert seconds[Kind.WASTED_PROGRESS] == 4 * 0.5
    assert seconds[Kind.INFRASTRUCTURE_RECOVERY] == 1.5 + START_SECONDS
    assert seconds[Kind.CHECKPOINT_RESTORING] == 0.25
    assert seconds[Kind.PRODUCTIVE_STEP] == 6 * 0.5 + 14 * 1.0


def test_a_group_that_never_stepped_is_part_of_the_recovery(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.lose_host("host-1")
    run.start_group(1, cause="host_lost", from_step=6, reach_step=False)
    before = RunHistory.load(run.store).goodput.seconds
    run.lose_host("host-0")
    run.start_group(1, cause="host_lost", from_step=6)
    run.train(20)
    seconds = RunHistory.load(run.store).goodput.seconds
    assert before[Kind.INFRASTRUCTURE_RECOVERY] == 0.75 + sum(PHASES.values())
    assert seconds[Kind.INFRASTRUCTURE_RECOVERY] == 0.75 + sum(PHASES.values()) + 0.75 + START_SECONDS


@settings(max_examples=25, deadline=None)
@given(ends=st.lists(st.sampled_from(["lost", "resized", "stopped"]), max_size=6))
def test_a_start_counts_as_what_made_it_necessary(
    ends: list[Literal["lost", "resized", "stopped"]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDirectoryBuilder(tmp_path_factory.mktemp("runs") / "quickstart")
    run.open()  # 0.5 s
    run.start_group(2)
    run.train(4)
    for end in ends:
        match end:
            case "lost":  # 0.25 s each to detect, to stop and to plan
                run.lose_host("host-1")
                run.continue_on(2, cause="host_lost", planned=False, from_step=run.step)
            case "resized":  # 0.25 s to save, 0.25 s to plan
                run.end_group("drained")
                run.continue_on(2, cause="drained", planned=True, from_step=run.step)
            case "stopped":
                run.end_group("stopped")
                run.end("stopped", cause="stopped")
                run.clock += 64
                run.open(resumed=True)
                run.start_group(2, from_step=run.step)
                run.train(run.step + 1)
        run.train(run.step + 4)
    goodput = RunHistory.load(run.store).goodput
    lost, resized, stopped = (ends.count(kind) for kind in ("lost", "resized", "stopped"))
    assert goodput.seconds[Kind.INFRASTRUCTURE_RECOVERY] == lost * (0.75 + START_SECONDS)
    assert goodput.seconds[Kind.ELASTIC_RESIZE] == resized * (0.25 + START_SECONDS)
    # The first start initializes the state, which is no restoring.
    starts = (1 + stopped) * (0.5 + START_SECONDS)
    assert goodput.seconds[Kind.PROGRAM_STARTUP] == starts + PHASES["restore"]
    assert sum(goodput.seconds.values()) == goodput.elapsed_seconds == run.clock - START


@pytest.mark.parametrize("living_at", [None, START + 1000])
def test_goodput_of_a_disturbed_run_sums_to_its_wall_time(tmp_path: Path, living_at: float | None) -> None:
    history = RunHistory.load(play_disturbed_run(tmp_path / "run").store, living_at=living_at)
    assert history.started == START
    assert history.ended is not None
    assert sum(history.goodput.seconds.values()) == pytest.approx(history.ended - START, rel=1e-12)
    assert history.goodput.seconds[Kind.OTHER] < 0.3


# --- commits, topologies, throughput


def test_the_newest_usable_commit_is_the_highest_step_that_is_not_quarantined(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    for step in (9, 10, 11):
        run.train(step)
        run.checkpoint()
    newest = RunHistory.load(run.store).newest_commit
    assert newest is not None
    assert newest.step == 11
    run.quarantine(11, 1)
    history = RunHistory.load(run.store)
    assert [commit.step for commit in history.commits] == [9, 10]
    assert [record.step for record in history.quarantined] == [11]


def test_a_quarantine_counts_even_if_its_record_is_damaged(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(9)
    run.checkpoint()
    run.quarantine(9, 1)
    run.break_json("quarantine/9.1.json")
    history = RunHistory.load(run.store)
    assert history.newest_commit is None
    assert len(history.problems) == 1


def test_a_quarantine_does_not_reach_the_same_step_of_another_incarnation(run: RunDirectoryBuilder) -> None:
    for incarnation in (2, 10):
        commit = CommitRecord(
            step=9,
            incarnation=incarnation,
            path=f"checkpoints/{incarnation}/9",
            files=(FileRecord(path="a", size=1, crc32c="0" * 8),),
            committed=START,
        )
        run.store.write(f"commits/9.{incarnation}.json", to_json(commit))
    assert [commit.incarnation for commit in RunHistory.load(run.store).commits] == [2, 10]
    run.quarantine(9, 10)
    assert [commit.incarnation for commit in RunHistory.load(run.store).commits] == [2]


def test_topologies_say_which_steps_they_trained_and_which_were_kept(tmp_path: Path) -> None:
    spans = RunHistory.load(play_disturbed_run(tmp_path / "run").store).topologies
    assert [(span.num_hosts, span.first_step, span.last_step, span.kept_step) for span in spans] == [
        (4, 1, 118, 100),
        (3, 101, 150, 150),
        (4, 151, 220, 200),
        (3, 201, 300, 300),
    ]
    times = [time for span in spans for time in (span.started, span.ended) if time is not None]
    assert len(times) == 8
    assert times == sorted(times)


def test_throughput_is_tokens_per_step_time_at_the_time_the_step_ended(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    began = run.clock
    run.train(4, step_seconds=0.5)
    run.train(6, step_seconds=2.0)
    history = RunHistory.load(run.store)
    assert [point.time - began for point in history.throughput] == [0.5, 1.0, 1.5, 2.0, 4.0, 6.0]
    assert [point.tokens_per_second for point in history.throughput] == [4096] * 4 + [1024] * 2
    assert history.tokens_per_second == 6 * 2048 / 6
    assert history.seconds_left == 14 * 0.5  # at the median pace


def test_the_pace_is_that_of_the_newest_group_alone(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(4)
    run.train(10)
    run.lose_host("host-3")
    run.continue_on(2, cause="host_lost", planned=False, from_step=10)
    run.train(12)
    assert RunHistory.load(run.store).tokens_per_second == 2048 / 0.5


# --- damage


def test_a_torn_last_line_is_no_problem_and_no_step(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.tear_last_line("metrics/1/1.jsonl")
    run.tear_last_line("journal/1/1.jsonl")
    history = RunHistory.load(run.store)
    assert history.step == 9
    assert history.problems == ()


def test_an_incarnation_that_wrote_only_a_torn_line_hides_nothing(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.start_group(2, from_step=5)
    run.train(6)
    run.tear_last_line("metrics/2/6.jsonl")
    assert RunHistory.load(run.store).step == 10


def test_a_damaged_first_line_hides_earlier_steps_all_the_same(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.start_group(2, from_step=5)
    run.train(8)
    run.damage_line("metrics/2/6.jsonl", 1)
    history = RunHistory.load(run.store)
    assert [step.step for step in history.steps] == [1, 2, 3, 4, 5, 7, 8]
    assert len(history.abandoned) == 5
    assert len(history.problems) == 1
    assert "metrics/2/6.jsonl line 1" in history.problems[0]


def test_an_unknown_event_is_listed_and_the_rest_is_read(run: RunDirectoryBuilder) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.journal_unknown_event()
    run.checkpoint()
    history = RunHistory.load(run.store)
    assert isinstance(history.events[-1], CheckpointCommitted)
    assert len(history.problems) == 1
    assert "'teleported'" in history.problems[0]


@pytest.mark.parametrize(
    "key",
    ["run.json", "lease.json", "segments/2.json", "commits/100.1.json", "journal/2/1.jsonl", "metrics/3/151.jsonl"],
)
def test_one_broken_file_is_listed_and_the_rest_is_read(tmp_path: Path, key: str) -> None:
    built = play_disturbed_run(tmp_path / "run")
    whole = RunHistory.load(built.store)
    built.store.path(key).write_bytes(b"\xff\x00{]\n")
    history = RunHistory.load(built.store)
    assert len(history.problems) == 1
    assert key in history.problems[0]
    assert history.step == whole.step
    assert history.state == whole.state


def test_each_broken_file_alone_never_stops_the_reading(tmp_path: Path) -> None:
    """Every object of the directory in turn, cut in half, then replaced by a directory."""
    built = play_disturbed_run(tmp_path / "run")
    for key, _ in built.store.files(""):
        path = built.store.path(key)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert RunHistory.load(built.store).run is not None or key == "run.json"
        path.unlink()
        path.mkdir()
        assert any(key in problem for problem in RunHistory.load(built.store).problems)
        path.rmdir()
        path.write_bytes(content)
    assert RunHistory.load(built.store).problems == ()


def test_names_that_nothing_here_writes_are_listed_not_read(run: RunDirectoryBuilder) -> None:
    run.open()
    run.store.write("commits/notes.txt", b"hello")
    run.store.write("metrics/old/1.jsonl", b"{}\n")
    assert len(RunHistory.load(run.store).problems) == 2


def test_without_a_journal_the_metrics_and_segments_still_tell_the_steps(tmp_path: Path) -> None:
    built = play_disturbed_run(tmp_path / "run")
    built.store.delete_tree("journal")
    history = RunHistory.load(built.store)
    assert history.step == 300
    assert [span.num_hosts for span in history.topologies] == [4, 3, 4, 3]
    assert history.throughput == ()
    assert history.timeline == ()


# --- controllers that died ----------------------------------------------------------------------------------------


def opened(newest_commit: int | None) -> RunOpened:
    return RunOpened(time=0.0, monotonic=0.0, incarnation=1, resumed=True, newest_commit=newest_commit, steps=100)


def ended() -> RunEnded:
    return RunEnded(time=0.0, monotonic=0.0, incarnation=1, outcome="stopped", cause="stopped", step=0)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_deaths_are_those_since_the_last_progress_or_told_end(gains: list[int]) -> None:
    """Each controller adds `gain` commits and dies; 3 stands for one that ends as it should."""
    events: list[JournalEvent] = []
    commit, deaths = 0, 0
    for gain in gains:
        events.append(opened(commit or None))
        if gain == 3:
            events.append(ended())
            deaths = 0
        else:
            commit += gain
            deaths = 0 if gain else deaths + 1
    assert deaths_without_progress(events, commit or None) == deaths


def test_a_rollback_is_no_death(run: RunDirectoryBuilder) -> None:
    """The newest commit is older afterwards, as after a row of controllers that came to nothing."""
    told = RolledBack(time=0.0, monotonic=0.0, incarnation=1, to_step=10, from_step=60, reason="")
    assert deaths_without_progress([opened(None), opened(60), told, opened(10)], 10) == 1  # the one that lives now
    assert deaths_without_progress([opened(60), opened(60), told, opened(10)], 20) == 0


def test_after_a_rollback_the_run_is_stopped_and_what_interrupted_it_before_stays_as_it_was(
    run: RunDirectoryBuilder,
) -> None:
    run.open()
    run.start_group(2)
    run.train(10)
    run.checkpoint()
    run.train(18)
    run.clock += 60  # its controller was killed, a minute ago
    run.roll_back(10, "bad data")
    history = RunHistory.load(run.store)
    assert (history.step, history.state, history.incidents) == (10, "stopped", ())
    assert history.goodput.seconds[Kind.STOPPED] == pytest.approx(60)
    assert history.goodput.seconds[Kind.WASTED_PROGRESS] == pytest.approx(8 * 0.5)

    run.clock += 30
    run.open(resumed=True)
    run.start_group(2, from_step=10)
    run.train(12)
    history = RunHistory.load(run.store, living_at=run.clock)
    assert (history.step, history.state, history.message, history.incidents) == (12, "running", "", ())
    assert history.goodput.seconds[Kind.STOPPED] == pytest.approx(90)
