"""Recorded capacity: when the nodes of a spot market came and went, as a number of hosts over time.

One event a line, `milliseconds since start,add|remove,node name`, in order of time. Blank lines and CRLF are allowed.
Nodes are named so that a damaged recording is noticed: to add a node that is there, or to remove one that is not, is an
error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from trainer.errors import ConfigError

TraceAction = Literal["add", "remove"]


@dataclass(frozen=True)
class TraceEvent:
    milliseconds: int
    action: TraceAction
    node: str


@dataclass(frozen=True)
class StepFunction:
    """A number of hosts over time: `hosts[i]` from `seconds[i]` on, 0 before the first."""

    seconds: tuple[float, ...]
    """Strictly rising."""
    hosts: tuple[int, ...]
    """Neighbours differ, and the first is not 0: each time is a change."""

    def __post_init__(self) -> None:
        assert len(self.seconds) == len(self.hosts)
        assert all(before < after for before, after in pairwise(self.seconds))
        assert all(before != after for before, after in pairwise((0, *self.hosts)))

    def offered_at(self, seconds: float) -> int:
        index = bisect_right(self.seconds, seconds)
        return self.hosts[index - 1] if index else 0

    def next_change_after(self, seconds: float) -> float | None:
        """None: it stays as it is for ever."""
        index = bisect_right(self.seconds, seconds)
        return self.seconds[index] if index < len(self.seconds) else None


def parse_trace(text: str, *, name: str) -> tuple[TraceEvent, ...]:
    """The events of a trace. `name` is what errors call it.

    Raises:
        ConfigError: a line is malformed or impossible, named by its number; or there is no event at all.
    """
    events: list[TraceEvent] = []
    present: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            event = _parse_line(line)
            if events and event.milliseconds < events[-1].milliseconds:
                raise ValueError(f"time goes back from {events[-1].milliseconds} to {event.milliseconds} ms")
            if event.action == "add" and event.node in present:
                raise ValueError(f"{event.node} is added but is there already")
            if event.action == "remove" and event.node not in present:
                raise ValueError(f"{event.node} is removed but is not there")
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from error
        present.symmetric_difference_update({event.node})
        events.append(event)
    if not events:
        raise ConfigError(f"{name} holds no event; a trace has lines as 60000,add,node-1")
    return tuple(events)


def _parse_line(line: str) -> TraceEvent:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or not all(fields):
        raise ValueError(f"{line.strip()!r} is not milliseconds,add|remove,node")
    milliseconds, action, node = fields
    if not (milliseconds.isascii() and milliseconds.isdecimal()):
        raise ValueError(f"{milliseconds!r} is no number of milliseconds; a whole number from 0 up is needed")
    if action not in get_args(TraceAction):
        raise ValueError(f"{action!r} is neither add nor remove")
    return TraceEvent(int(milliseconds), action, node)  # type: ignore[arg-type]  # just checked


def availability(events: Iterable[TraceEvent]) -> StepFunction:
    """How many nodes there were, as recorded. Events of the same moment are one change."""
    counts: dict[float, int] = {}
    present = 0
    for event in events:
        present += 1 if event.action == "add" else -1
        counts[event.milliseconds / 1000] = present
    return _changes(counts.items())


def replay(recorded: StepFunction, *, speed: float, most_hosts: int | None) -> StepFunction:
    """The recording `speed` times faster, its maximum scaled to `most_hosts` (None: not scaled).

    Counts are rounded to the nearest, halves up: none stay none, the maximum becomes `most_hosts`.
    """
    maximum = max(recorded.hosts, default=0)
    if maximum == 0:
        return recorded
    scaled_to = maximum if most_hosts is None else most_hosts
    # Moments that fall together at this speed, or that no float tells apart any more, are one change: the last counts.
    return _changes(
        {
            seconds / speed: (2 * hosts * scaled_to + maximum) // (2 * maximum)
            for seconds, hosts in zip(recorded.seconds, recorded.hosts, strict=True)
        }.items()
    )


def _changes(counts: Iterable[tuple[float, int]]) -> StepFunction:
    """Leave out what changes nothing."""
    seconds: list[float] = []
    hosts: list[int] = []
    for moment, count in counts:
        if count != (hosts[-1] if hosts else 0):
            seconds.append(moment)
            hosts.append(count)
    return StepFunction(tuple(seconds), tuple(hosts))
