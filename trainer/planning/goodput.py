"""Goodput: which part of a run's wall time became training progress, and where the rest went.

Values in, values out: the caller (`trainer.history`) turns a journal into spans, this module divides the elapsed time
among them so that each moment is counted exactly once. Kinds follow ml-goodput-measurement; where it speaks of TPUs
we say accelerator, and it has no word for capacity that is not there. Its program startup is every start of the
program; here a start that an incident or a resize made necessary belongs to what made it necessary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a moment was spent on. Where spans overlap, the kind named first here has it."""

    CHECKPOINT_SAVING = "checkpoint_saving"
    """Training stood still for a save. What is written while steps go on costs nothing here."""
    WASTED_PROGRESS = "wasted_progress_from_disruption"
    """Steps that a rollback abandoned."""
    PRODUCTIVE_STEP = "productive_step"
    """Steps on the current line of history: this alone is goodput."""
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    """Fewer usable hosts than `num_hosts.min`, or the lost host awaited in `pause` mode."""
    CHECKPOINT_RESTORING = "checkpoint_restoring"
    DATA_LOADING = "data_loading"
    """Opening the data before the first step. Loading between steps overlaps with them or is part of them."""
    ACCELERATOR_INITIALIZATION = "accelerator_initialization"
    """Rendezvous of the processes and opening of their devices (`TPU_INITIALIZATION`)."""
    INFRASTRUCTURE_RECOVERY = "infrastructure_recovery_from_disruption"
    """From the last finished step of a group that ended unplanned to the first step of the group that follows: what of
    it no other kind names, such as stopping, planning, imports and compilation."""
    ELASTIC_RESIZE = "elastic_resize"
    """The same from the planned end of a group."""
    PROGRAM_STARTUP = "program_startup"
    """The same from the start of the run, or from its resumption after a stop."""
    STOPPED = "stopped"
    """The run was ended and later resumed: neither goodput nor badput."""
    OTHER = "other"
    """Unaccounted; also the step in flight of a living run."""


BADPUT_KINDS: tuple[Kind, ...] = tuple(kind for kind in Kind if kind not in (Kind.PRODUCTIVE_STEP, Kind.STOPPED))

_PRECEDENCE = {kind: rank for rank, kind in enumerate(Kind)}


@dataclass(frozen=True)
class Span:
    """Wall time from `start` to `end`, in seconds since the epoch."""

    kind: Kind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """Seconds per kind. All kinds together are the elapsed wall time."""

    seconds: Mapping[Kind, float]
    """Every kind, zeros included, in the order of `Kind`."""
    elapsed_seconds: float

    @property
    def productive_seconds(self) -> float:
        return self.seconds[Kind.PRODUCTIVE_STEP]

    @property
    def badput(self) -> dict[Kind, float]:
        """Seconds per badput kind, largest first, without the kinds that did not occur."""
        found = {kind: self.seconds[kind] for kind in BADPUT_KINDS if self.seconds[kind] > 0}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def running_seconds(self) -> float:
        """The elapsed time without that in which the run was stopped: what the fraction refers to."""
        return self.elapsed_seconds - self.seconds[Kind.STOPPED]

    @property
    def fraction(self) -> float | None:
        """Productive part of the running time, 0 to 1; None before any time has passed."""
        return self.productive_seconds / self.running_seconds if self.running_seconds > 0 else None


def divide_timeline(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Divide `start` … `end` into adjacent spans, in order and without gaps.

    Overlaps go to the kind that `Kind` names first, uncovered time to `Kind.OTHER`. Spans may come in any order,
    reach beyond the limits or be empty: clocks of different controllers need not agree.
    """
    clipped = [
        Span(span.kind, max(span.start, start), min(span.end, end))
        for span in spans
        if min(span.end, end) > max(span.start, start)
    ]
    changes: dict[float, list[tuple[Kind, int]]] = {start: [], end: []}
    for span in clipped:
        changes.setdefault(span.start, []).append((span.kind, 1))
        changes.setdefault(span.end, []).append((span.kind, -1))
    open_spans = dict.fromkeys(Kind, 0)
    timeline: list[Span] = []
    boundaries = sorted(changes)
    for left, right in itertools.pairwise(boundaries):
        for kind, change in changes[left]:
            open_spans[kind] += change
        kind = min(
            (kind for kind, count in open_spans.items() if count), key=_PRECEDENCE.__getitem__, default=Kind.OTHER
        )
        if timeline and timeline[-1].kind == kind:
            timeline[-1] = Span(kind, timeline[-1].start, right)
        else:
            timeline.append(Span(kind, left, right))
    return timeline


def measure_goodput(timeline: Sequence[Span]) -> Goodput:
    """Sum up a timeline made by `divide_timeline`."""
    seconds = {kind: math.fsum(span.seconds for span in timeline if span.kind == kind) for kind in Kind}
    return Goodput(seconds=seconds, elapsed_seconds=timeline[-1].end - timeline[0].start if timeline else 0.0)
