"""What a run directory says of a run, whatever state it is in: living, dead, moved or partly damaged.

`RunHistory.load` reads the records, once, without a lock and without writing; status, report, verify and the
controller's own decisions read from it. Damage is never fatal here: a line or file that cannot be read is left out and
listed in `problems`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import ValidationError

from trainer.errors import StorageError
from trainer.planning.goodput import Goodput, Kind, Span, divide_timeline, measure_goodput
from trainer.planning.topology import TopologyPlan
from trainer.records import (
    PLANNED_CAUSES,
    Cause,
    CheckpointSaving,
    CommitRecord,
    FirstStep,
    GroupEnded,
    GroupReady,
    GroupStarting,
    Incident,
    JournalEvent,
    LeaseRecord,
    MetricsRecord,
    PhaseName,
    QuarantineRecord,
    Record,
    Recovered,
    RollbackRecord,
    RolledBack,
    RunEnded,
    RunOpened,
    RunRecord,
    SegmentRecord,
    Waiting,
    WorkerPhase,
    parse_event,
)
from trainer.store import Store

RunState = Literal["running", "waiting", "complete", "stopped", "failed", "dead"]
"""`dead`: it did not end, and no controller is known to live."""

_RecordT = TypeVar("_RecordT", bound=Record)

# Steps behind the rates that a person sees: long enough to be calm, short enough to follow a change of topology.
_RECENT_STEPS = 20


@dataclass(frozen=True)
class TrainedStep:
    """One finished step, and where it stands in time."""

    record: MetricsRecord
    incarnation: int
    ended: float | None
    """Seconds since the epoch; None: the journal does not tell when its group began to step."""

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def started(self) -> float | None:
        return None if self.ended is None else self.ended - self.record.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return self.record.tokens / self.record.step_seconds if self.record.step_seconds > 0 else None


@dataclass(frozen=True)
class IncidentView:
    """An interruption of training from its beginning to the first step after it: an incident or a planned resize."""

    index: int
    """From 1, in the order of the journal, planned ones included."""
    planned: bool
    cause: Cause | Literal["controller_lost"]
    """`controller_lost`: a new controller took over without the old one having ended the run."""
    hosts: tuple[str, ...]
    """Lost or changed hosts."""
    step: int
    """Last finished step before it."""
    time: float
    """When it was noted in the journal; of a planned resize, `down_since`."""
    down_since: float
    """When training stood still: the last finished step, as far as it is known."""
    message: str = ""
    detected_seconds: float | None = None
    part_of: int | None = None
    """Index of the incident in whose down time this one happened. The numbers below are then that one's."""
    recovered: float | None = None
    """When the first step afterwards was finished. None, like all below: not yet, never, or `part_of` another."""
    resumed_from: int | None = None
    from_hosts: int | None = None
    to_hosts: int | None = None
    down_seconds: float | None = None
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds, on the slowest worker."""

    @property
    def steps_lost(self) -> int | None:
        return None if self.resumed_from is None else max(0, self.step - self.resumed_from)

    @property
    def title(self) -> str:
        """A few words for tables and plots, such as `host-2 lost` or `grow 3→4`."""
        if self.planned and self.from_hosts is not None and self.to_hosts is not None:
            if self.from_hosts == self.to_hosts:
                return "planned restart"
            return f"{'grow' if self.to_hosts > self.from_hosts else 'shrink'} {self.from_hosts}→{self.to_hosts}"
        if self.cause == "host_lost" and self.hosts:
            return f"{', '.join(self.hosts)} lost"
        return self.cause.replace("_", " ")

    @property
    def reason(self) -> str:
        """`cause` for people: of a planned one it is only how it was done, so this says what it was done for."""
        if not self.planned:
            return self.cause.replace("_", " ")
        if self.from_hosts is None or self.to_hosts is None or self.from_hosts == self.to_hosts:
            return "planned: another topology"
        return f"planned: {'more' if self.to_hosts > self.from_hosts else 'fewer'} hosts offered"


@dataclass(frozen=True)
class TopologySpan:
    """One incarnation that finished at least one step."""

    incarnation: int
    topology: TopologyPlan | None
    """None: neither journal nor segments hold it any more."""
    first_step: int
    last_step: int
    kept_step: int | None
    """Its last step on the current line of history; None: all of it was abandoned."""
    started: float | None
    """Start of its first step, seconds since the epoch."""
    ended: float | None
    """End of its last step."""

    @property
    def num_hosts(self) -> int | None:
        return None if self.topology is None else len(self.topology.hosts)


@dataclass(frozen=True)
class ThroughputPoint:
    """Tokens per second of one step as it happened, on the current line of history or not."""

    time: float
    """End of the step, seconds since the epoch."""
    tokens_per_second: float
    step: int
    incarnation: int
    kept: bool
    """Whether the step is on the current line of history."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run directory, read once. Times are seconds since the epoch."""

    location: str
    run: RunRecord | None
    lease: LeaseRecord | None
    steps: tuple[TrainedStep, ...]
    """The current line of history, in step order."""
    abandoned: tuple[TrainedStep, ...]
    """Steps that are off the line and were or will be trained again, as they were trained."""
    events: tuple[JournalEvent, ...]
    incidents: tuple[IncidentView, ...]
    """Unplanned and planned interruptions, in order."""
    segments: tuple[SegmentRecord, ...]
    commits: tuple[CommitRecord, ...]
    """Usable ones (on the current line of history, not quarantined), oldest step first."""
    quarantined: tuple[QuarantineRecord, ...]
    rollbacks: tuple[RollbackRecord, ...]
    """In order."""
    topologies: tuple[TopologySpan, ...]
    timeline: tuple[Span, ...]
    """What each moment between `started` and `ended` was spent on; see `trainer.planning.goodput`."""
    goodput: Goodput
    state: RunState
    message: str
    """What the run said when it ended or began to wait."""
    problems: tuple[str, ...]
    """What could not be read, one sentence each."""

    @classmethod
    def load(cls, store: Store, *, living_at: float | None = None) -> RunHistory:
        """Read the run directory; an empty one gives an empty history.

        Args:
            living_at: the present, if the caller knows that a controller holds the run. None: nobody does, and a run
                that has not ended is dead.

        Raises:
            StorageError: the storage cannot be listed. An object that cannot be read is a problem, not an error.
        """
        reader = _Reader(store)
        lines = reader.metrics()
        events = reader.events()
        segments = reader.segments()
        rollbacks = reader.rollbacks()
        commits, quarantined = reader.commits(rollbacks)
        first_steps = {incarnation: parts.first_step for incarnation, parts in lines.items()}
        anchors = _step_anchors(events)
        trained = {
            incarnation: _place_in_time(incarnation, parts.records, anchors.get(incarnation))
            for incarnation, parts in lines.items()
        }
        steps, abandoned = current_line(trained, first_steps, rollbacks)
        end = _end_of_timeline(events, trained, living_at)
        timeline = divide_timeline(_spans(events, steps, abandoned, end), events[0].time, end) if events else []
        state, message = _state(events, living=living_at is not None)
        return cls(
            location=store.location,
            run=reader.record("run.json", RunRecord),
            lease=reader.record("lease.json", LeaseRecord),
            steps=steps,
            abandoned=abandoned,
            events=events,
            incidents=_incidents(events, trained),
            segments=segments,
            commits=commits,
            quarantined=quarantined,
            rollbacks=rollbacks,
            topologies=_topologies(events, segments, trained, steps),
            timeline=tuple(timeline),
            goodput=measure_goodput(timeline),
            state=state,
            message=message,
            problems=tuple(reader.problems),
        )

    @property
    def metrics(self) -> tuple[MetricsRecord, ...]:
        """Of the current line of history, in step order."""
        return tuple(step.record for step in self.steps)

    @property
    def started(self) -> float | None:
        """When the run was first opened; None before that."""
        return self.timeline[0].start if self.timeline else None

    @property
    def ended(self) -> float | None:
        """The last moment the directory knows of; of a living run, the present."""
        return self.timeline[-1].end if self.timeline else None

    @property
    def step(self) -> int:
        """Last finished step of the current line of history; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def total_steps(self) -> int | None:
        """Steps asked for when the run was last opened."""
        opened = [event.steps for event in self.events if isinstance(event, RunOpened)]
        if opened:
            return opened[-1]
        return None if self.run is None else self.run.config.steps

    @property
    def newest_commit(self) -> CommitRecord | None:
        return self.commits[-1] if self.commits else None

    @property
    def topology(self) -> TopologyPlan | None:
        """Of the newest worker group, even if it has not finished a step."""
        started = [event.topology for event in self.events if isinstance(event, GroupStarting)]
        if started:
            return started[-1]
        return self.topologies[-1].topology if self.topologies else None

    @property
    def baseline_name(self) -> str:
        """What has the data's `baseline_loss`, for people."""
        if self.run is not None and self.run.config.job == "lm":
            return "a unigram model of the same bytes"
        return "the job's own baseline"

    @property
    def tokens_per_second(self) -> float | None:
        """Over the newest steps of the newest group."""
        recent = self._recent_steps
        seconds = math.fsum(step.record.step_seconds for step in recent)
        return sum(step.record.tokens for step in recent) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Steps left at the pace of the newest steps, without further interruptions; None if there is no pace yet."""
        if self.total_steps is None or not self._recent_steps:
            return None
        pace = statistics.median(step.record.step_seconds for step in self._recent_steps)
        return max(0, self.total_steps - self.step) * pace

    @functools.cached_property
    def throughput(self) -> tuple[ThroughputPoint, ...]:
        """Every step whose time is known, abandoned ones included, in time order."""
        points = [
            ThroughputPoint(step.ended, rate, step.step, step.incarnation, kept)
            for steps, kept in ((self.steps, True), (self.abandoned, False))
            for step in steps
            if step.ended is not None and (rate := step.tokens_per_second) is not None
        ]
        return tuple(sorted(points, key=lambda point: point.time))

    @property
    def _recent_steps(self) -> tuple[TrainedStep, ...]:
        recent = self.steps[-_RECENT_STEPS:]
        return tuple(step for step in recent if step.incarnation == recent[-1].incarnation)


def current_line(
    trained: Mapping[int, Sequence[TrainedStep]],
    first_steps: Mapping[int, int],
    rollbacks: Iterable[RollbackRecord] = (),
) -> tuple[tuple[TrainedStep, ...], tuple[TrainedStep, ...]]:
    """Split the steps of all incarnations into the current line of history and what was abandoned.

    An incarnation whose first step is `s + 1` hides what earlier incarnations recorded above `s`, and so does a
    rollback to `s`.
    """
    line: dict[int, TrainedStep] = {}
    abandoned: list[TrainedStep] = []
    for incarnation in sorted(trained):
        hidden = [step for step in line if step >= first_steps[incarnation]]
        abandoned += [line.pop(step) for step in sorted(hidden)]
        line |= {step.step: step for step in trained[incarnation]}
    for rollback in rollbacks:
        hidden = [step for step, trained_step in line.items() if rollback.hides(step, trained_step.incarnation)]
        abandoned += [line.pop(step) for step in sorted(hidden)]
    return tuple(line[step] for step in sorted(line)), tuple(abandoned)


def deaths_without_progress(events: Iterable[JournalEvent], newest_commit: int | None) -> int:
    """How many controllers in a row ended without a word (killed, machine gone) and without a newly committed step.

    Args:
        events: the journal so far, in order.
        newest_commit: the newest committed step now; None: none.
    """
    deaths, opened = 0, None
    for event in events:
        match event:
            case RunOpened():
                if opened is not None:
                    deaths = 0 if (event.newest_commit or 0) > (opened.newest_commit or 0) else deaths + 1
                opened = event
            case RunEnded() | RolledBack():  # after a rollback the newest commit is older, and that is no failure
                deaths, opened = 0, None
    if opened is None:
        return 0
    return 0 if (newest_commit or 0) > (opened.newest_commit or 0) else deaths + 1


def rolled_back_text(rollback: RollbackRecord | RolledBack) -> str:
    """For people: `rolled back from step 60 to step 40: the loss went up`."""
    reason = f": {rollback.reason}" if rollback.reason else ""
    return f"rolled back from step {rollback.from_step} to step {rollback.to_step}{reason}"


def duration_text(seconds: float) -> str:
    """For people: `4.2 s`, `1 min 46 s`, `3 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _IncarnationMetrics:
    first_step: int
    records: tuple[MetricsRecord, ...]
    """In step order, one per step."""


class _Reader:
    """Reads objects of a run directory and keeps a list of what it could not read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.problems: list[str] = []

    def record(self, key: str, model: type[_RecordT]) -> _RecordT | None:
        data = self._read(key)
        if data is None:
            return None
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            self.problems.append(f"{key} is damaged: {_first_problem(error)}")
            return None

    def metrics(self) -> dict[int, _IncarnationMetrics]:
        """Of each incarnation that has at least one whole line."""
        found = {}
        for incarnation, directory in self._numbered("metrics", r"(\d+)"):
            records: dict[int, MetricsRecord] = {}
            first_steps = []
            for first_step, key in self._numbered(directory, r"(\d+)\.jsonl"):
                lines = list(self._lines(key))
                if lines:
                    # The name counts, not the first line: that one may be damaged.
                    first_steps.append(first_step)
                for number, line in lines:
                    try:
                        record = MetricsRecord.model_validate_json(line)
                    except ValidationError as error:
                        self.problems.append(f"{key} line {number} is damaged: {_first_problem(error)}")
                    else:
                        records[record.step] = record
            if first_steps:
                found[incarnation] = _IncarnationMetrics(
                    first_steps[0], tuple(records[step] for step in sorted(records))
                )
        return found

    def events(self) -> tuple[JournalEvent, ...]:
        events = []
        for _, directory in self._numbered("journal", r"(\d+)"):
            for _, key in self._numbered(directory, r"(\d+)\.jsonl"):
                for number, line in self._lines(key):
                    event = parse_event(line)
                    if event is not None:
                        events.append(event)
                    else:
                        self.problems.append(f"{key} line {number} {_why_no_event(line)}")
        return tuple(events)

    def segments(self) -> tuple[SegmentRecord, ...]:
        found = [self.record(key, SegmentRecord) for _, key in self._numbered("segments", r"(\d+)\.json")]
        return tuple(segment for segment in found if segment is not None)

    def rollbacks(self) -> tuple[RollbackRecord, ...]:
        found = [self.record(key, RollbackRecord) for _, key in self._numbered("rollbacks", r"(\d+)\.json")]
        return tuple(rollback for rollback in found if rollback is not None)

    def commits(
        self, rollbacks: Sequence[RollbackRecord]
    ) -> tuple[tuple[CommitRecord, ...], tuple[QuarantineRecord, ...]]:
        """Usable commits, and the quarantine. A quarantine file counts by its name, even if it cannot be read."""
        pattern = r"(\d+)\.(\d+)\.json"
        quarantine_keys = [key for _, key in self._numbered("quarantine", pattern)]
        quarantined_names = {key.rpartition("/")[2] for key in quarantine_keys}
        commits = [
            self.record(key, CommitRecord)
            for _, key in self._numbered("commits", pattern)
            if key.rpartition("/")[2] not in quarantined_names
        ]
        usable = [
            commit
            for commit in commits
            if commit and not any(rollback.hides(commit.step, commit.incarnation) for rollback in rollbacks)
        ]
        quarantined = [self.record(key, QuarantineRecord) for key in quarantine_keys]
        return (
            tuple(sorted(usable, key=lambda commit: (commit.step, commit.incarnation))),
            tuple(record for record in quarantined if record),
        )

    def _numbered(self, prefix: str, pattern: str) -> list[tuple[int, str]]:
        """(first number in the name, key) of each child, in the order of all its numbers."""
        found = []
        for name in self._store.names(prefix):
            match = re.fullmatch(pattern, name, re.ASCII)
            if match:
                found.append(([int(number) for number in match.groups()], f"{prefix}/{name}"))
            else:
                self.problems.append(f"{prefix}/{name} has a name that nothing here writes; it was not read")
        return [(numbers[0], key) for numbers, key in sorted(found)]

    def _lines(self, key: str) -> Iterator[tuple[int, bytes]]:
        """(number, line) of each line; a torn last one is left out: its writer died, or is still at it."""
        data = self._read(key) or b""
        lines = data.split(b"\n")
        torn = lines.pop()
        if torn and _is_json(torn):
            lines.append(torn)
        return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.read(key)
        except StorageError as error:
            self.problems.append(f"{key} cannot be read: {error}")
            return None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _why_no_event(line: bytes) -> str:
    try:
        values = json.loads(line)
    except ValueError:
        return "is damaged: it is not JSON"
    if not isinstance(values, dict) or "event" not in values:
        return "is damaged: it names no event"
    return f"holds an event {values['event']!r} that this version cannot read"


# --- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Anchor:
    """A moment from which the ends of an incarnation's steps are counted."""

    time: float
    step: int | None
    """The step that ended then; None: the first one began then."""


def _step_anchors(events: Iterable[JournalEvent]) -> dict[int, _Anchor]:
    anchors: dict[int, _Anchor] = {}
    for event in events:
        match event:
            case FirstStep():
                anchors[event.incarnation] = _Anchor(event.time, event.step)
            case GroupReady():
                anchors.setdefault(event.incarnation, _Anchor(event.time, None))
            case _:
                pass
    return anchors


def _place_in_time(
    incarnation: int, records: Sequence[MetricsRecord], anchor: _Anchor | None
) -> tuple[TrainedStep, ...]:
    """Metrics hold durations, not times: count them on from the anchor."""
    if anchor is None:
        return tuple(TrainedStep(record, incarnation, None) for record in records)
    up_to_anchor = math.fsum(
        record.step_seconds for record in records if anchor.step is not None and record.step <= anchor.step
    )
    steps = []
    since_first = 0.0
    for record in records:
        since_first += record.step_seconds
        steps.append(TrainedStep(record, incarnation, anchor.time + since_first - up_to_anchor))
    return tuple(steps)


def _end_of_timeline(
    events: Sequence[JournalEvent], trained: Mapping[int, Sequence[TrainedStep]], living_at: float | None
) -> float:
    ended = [event.time for event in events]
    ended += [steps[-1].ended for steps in trained.values() if steps and steps[-1].ended is not None]
    if living_at is not None:
        ended.append(living_at)
    return max(ended, default=0.0)


def _spans(
    events: Sequence[JournalEvent], steps: Sequence[TrainedStep], abandoned: Sequence[TrainedStep], end: float
) -> list[Span]:
    """What the journal and the metrics say of the time between the first event and `end`; they may overlap.

    The journal is read as a sequence of groups and of gaps between them. `mark` is where the present gap began, `gap`
    what it counts as, with the start of the group that ends it.
    """
    spans = [*_step_spans(steps, Kind.PRODUCTIVE_STEP), *_step_spans(abandoned, Kind.WASTED_PROGRESS)]
    last_step_ended: dict[int, float] = {}
    for step in (*steps, *abandoned):
        if step.ended is not None:
            last_step_ended[step.incarnation] = max(step.ended, last_step_ended.get(step.incarnation, 0.0))
    stepped = set(last_step_ended)
    initialized = {
        event.incarnation for event in events if isinstance(event, GroupReady) and event.restored_from.tier == "init"
    }
    mark, gap = events[0].time if events else end, Kind.PROGRAM_STARTUP
    group: GroupStarting | None = None
    waiting_since: float | None = None
    for event in events:
        match event:
            case RunOpened():
                if waiting_since is not None:
                    spans.append(Span(Kind.WAITING_FOR_CAPACITY, waiting_since, event.time))
                    waiting_since = None
                if group is not None:  # the last controller died over its group
                    mark, gap = last_step_ended.get(group.incarnation, group.time), Kind.INFRASTRUCTURE_RECOVERY
                    group = None
                elif gap is Kind.STOPPED:
                    spans.append(Span(gap, mark, event.time))
                    mark, gap = event.time, Kind.PROGRAM_STARTUP
            case GroupStarting():
                spans.append(Span(gap, mark, event.time))
                if waiting_since is not None:
                    spans.append(Span(Kind.WAITING_FOR_CAPACITY, waiting_since, event.time))
                group, waiting_since = event, None
            case FirstStep() if group is not None:
                spans.append(Span(gap, group.time, event.time))
            case WorkerPhase() if event.incarnation in stepped:
                # Phases of an attempt that never finished a step are part of the recovery that it failed to be.
                kind = _PHASE_KINDS.get(event.phase)
                if kind is not None and not (event.phase == "restore" and event.incarnation in initialized):
                    spans.append(Span(kind, event.time - event.seconds, event.time))
            case CheckpointSaving():
                spans.append(Span(Kind.CHECKPOINT_SAVING, event.time - event.blocking_seconds, event.time))
            case Incident() | GroupEnded() if group is not None:
                last = last_step_ended.get(group.incarnation, group.time)
                if isinstance(event, GroupEnded) and event.cause in PLANNED_CAUSES:
                    spans.append(Span(Kind.CHECKPOINT_SAVING, last, event.time))
                    mark, gap = event.time, Kind.ELASTIC_RESIZE
                else:
                    mark, gap = last, Kind.INFRASTRUCTURE_RECOVERY
                group = None
            case Waiting():
                waiting_since = event.time if waiting_since is None else waiting_since
            case RolledBack():
                if waiting_since is not None:
                    spans.append(Span(Kind.WAITING_FOR_CAPACITY, waiting_since, event.time))
                if group is not None:  # its controller died over it, and nobody was to take over
                    mark = last_step_ended.get(group.incarnation, group.time)
                elif gap is not Kind.STOPPED:
                    mark = event.time
                gap, group, waiting_since = Kind.STOPPED, None, None
            case RunEnded():
                if waiting_since is not None:
                    spans.append(Span(Kind.WAITING_FOR_CAPACITY, waiting_since, event.time))
                if gap is Kind.INFRASTRUCTURE_RECOVERY:
                    spans.append(Span(gap, mark, event.time))
                mark, gap, group, waiting_since = event.time, Kind.STOPPED, None, None
            case _:
                pass
    if waiting_since is not None:
        spans.append(Span(Kind.WAITING_FOR_CAPACITY, waiting_since, end))
    if group is None:
        spans.append(Span(gap, mark, end))
    elif group.incarnation not in stepped:
        spans.append(Span(gap, group.time, end))
    return spans


# The other phases stay what lies below them: what made the start necessary.
_PHASE_KINDS: Mapping[PhaseName, Kind] = {
    "rendezvous": Kind.ACCELERATOR_INITIALIZATION,
    "devices": Kind.ACCELERATOR_INITIALIZATION,
    "restore": Kind.CHECKPOINT_RESTORING,
    "data": Kind.DATA_LOADING,
}


def _step_spans(steps: Iterable[TrainedStep], kind: Kind) -> Iterator[Span]:
    """One span per unbroken row of steps, not per step: runs are long."""
    row: Span | None = None
    previous: TrainedStep | None = None
    for step in steps:
        if step.started is None or step.ended is None:
            continue
        if row and previous and (step.incarnation, step.step) == (previous.incarnation, previous.step + 1):
            row = Span(kind, row.start, step.ended)
        else:
            if row:
                yield row
            row = Span(kind, step.started, step.ended)
        previous = step
    if row:
        yield row


# --- views --------------------------------------------------------------------------------------------------------


def _state(events: Sequence[JournalEvent], *, living: bool) -> tuple[RunState, str]:
    state: RunState = "running" if living else "dead"
    message = ""
    for event in events:
        match event:
            case RunOpened() | GroupStarting():
                state, message = "running" if living else "dead", ""
            case Waiting():
                state, message = "waiting" if living else "dead", event.reason
            case RunEnded():
                state, message = event.outcome, event.message
            case RolledBack():
                state, message = "stopped", rolled_back_text(event)
            case _:
                pass
    return state, message


class _IncidentBook:
    """Pairs what interrupts training with what ends the interruption, in journal order."""

    def __init__(self, trained: Mapping[int, Sequence[TrainedStep]]) -> None:
        self.views: list[IncidentView] = []
        self._trained = trained
        self._open: IncidentView | None = None
        self._stepped_since = False
        self._group: GroupStarting | None = None

    def group_starting(self, event: GroupStarting) -> None:
        self._group = event

    def interrupted(self, view: IncidentView) -> None:
        if self._stepped_since:
            self._open = None  # its Recovered was lost: the first step is the next best evidence
        if self._open is not None:
            view = dataclasses.replace(view, part_of=self._open.index)
        self.views.append(view)
        if self._open is None:
            self._open, self._stepped_since = view, False

    def incident(self, event: Incident) -> None:
        self.interrupted(
            IncidentView(
                index=len(self.views) + 1,
                planned=False,
                cause=event.cause,
                hosts=event.host_ids,
                step=event.step,
                time=event.time,
                down_since=self._last_step_ended() or event.time - event.detected_seconds,
                message=event.message,
                detected_seconds=event.detected_seconds,
                from_hosts=event.total,
            )
        )

    def controller_lost(self, event: RunOpened) -> None:
        if self._group is None:
            return  # no training had begun that could be interrupted
        self.interrupted(
            IncidentView(
                index=len(self.views) + 1,
                planned=False,
                cause="controller_lost",
                hosts=(),
                step=self._last_step(),
                time=event.time,
                down_since=self._last_step_ended() or event.time,
                message="the controller ended without ending the run; another one took over",
                from_hosts=len(self._group.topology.hosts),
            )
        )

    def first_step(self, event: FirstStep) -> None:
        if self._open is None or self._stepped_since:
            return
        self._stepped_since = True
        self._update(
            recovered=event.time,
            resumed_from=event.step - 1,
            down_seconds=event.time - self._open.down_since,
            to_hosts=None if self._group is None else len(self._group.topology.hosts),
        )

    def recovered(self, event: Recovered) -> None:
        down_since = event.time - event.down_seconds
        if self._open is None:
            view = IncidentView(
                index=len(self.views) + 1,
                planned=event.planned,
                cause=event.cause,
                hosts=event.hosts,
                step=event.step,
                time=down_since,
                down_since=down_since,
            )
            self.views.append(view)
            self._open = view
        self._update(
            recovered=event.time,
            step=event.step,
            down_since=down_since,
            resumed_from=event.resumed_from,
            from_hosts=event.from_hosts,
            to_hosts=event.to_hosts,
            down_seconds=event.down_seconds,
            phases=event.phases,
            hosts=self._open.hosts or event.hosts,
        )
        self._open, self._stepped_since = None, False

    def run_ended(self) -> None:
        self._open, self._stepped_since = None, False

    def _update(self, **changes: object) -> None:
        assert self._open is not None
        position = self._open.index - 1
        self._open = self.views[position] = dataclasses.replace(self._open, **changes)  # type: ignore[arg-type]

    def _steps_of_group(self) -> Sequence[TrainedStep]:
        return self._trained.get(self._group.incarnation, ()) if self._group is not None else ()

    def _last_step(self) -> int:
        steps = self._steps_of_group()
        if steps:
            return steps[-1].step
        return max((step.step for steps in self._trained.values() for step in steps), default=0)

    def _last_step_ended(self) -> float | None:
        steps = self._steps_of_group()
        return steps[-1].ended if steps else None


def _incidents(
    events: Iterable[JournalEvent], trained: Mapping[int, Sequence[TrainedStep]]
) -> tuple[IncidentView, ...]:
    book = _IncidentBook(trained)
    running = False
    for event in events:
        match event:
            case RunOpened():
                if running:
                    book.controller_lost(event)
                running = True
            case GroupStarting():
                book.group_starting(event)
            case Incident():
                book.incident(event)
            case FirstStep():
                book.first_step(event)
            case Recovered():
                book.recovered(event)
            case RunEnded() | RolledBack():
                book.run_ended()
                running = False
            case _:
                pass
    return tuple(book.views)


def _topologies(
    events: Iterable[JournalEvent],
    segments: Iterable[SegmentRecord],
    trained: Mapping[int, Sequence[TrainedStep]],
    line: Iterable[TrainedStep],
) -> tuple[TopologySpan, ...]:
    topology_of = {segment.incarnation: segment.topology for segment in segments}
    topology_of |= {event.incarnation: event.topology for event in events if isinstance(event, GroupStarting)}
    kept_step: dict[int, int] = {}
    for step in line:
        kept_step[step.incarnation] = step.step
    return tuple(
        TopologySpan(
            incarnation=incarnation,
            topology=topology_of.get(incarnation),
            first_step=steps[0].step,
            last_step=steps[-1].step,
            kept_step=kept_step.get(incarnation),
            started=steps[0].started,
            ended=steps[-1].ended,
        )
        for incarnation, steps in sorted(trained.items())
        if steps
    )
