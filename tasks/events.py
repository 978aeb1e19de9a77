"""What a run tells Prefect as events, for automations to act on: `shoal.started`, `shoal.incident` and so on.

Where a run stands decides what is told, and not each thing that happens: what was true only between two looks is left
out, so that the number of events is bounded. Incidents alone are told one by one.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trainer import records
from trainer.progress import ProgressView
from trainer.records import JournalEvent, MetricsRecord

STARTED = "shoal.started"
WAITING = "shoal.waiting"
RESUMED = "shoal.resumed"
PROGRESS = "shoal.progress"
INCIDENT = "shoal.incident"
GOODPUT = "shoal.goodput"
ENDED = "shoal.ended"
CAPACITY_CHANGED = "shoal.capacity.changed"
"""Of a run that has hosts of its own; a service's pool tells its own changes."""

RESOURCE_PREFIX = "shoal.run."
"""Before the run's name: the id of the resource that all these events are about."""
GOODPUT_LABEL = "shoal.goodput-percent"
"""On the resource of `shoal.goodput`: a whole number. Triggers can compare labels, and nothing else of an event."""

PROGRESS_INTERVAL_SECONDS = 10.0
GOODPUT_INTERVAL_SECONDS = 60.0
# Before that, start-up is most of the time and goodput is low whatever happens.
GOODPUT_FROM_SECONDS = 600.0
_MOST_INCIDENTS = 20


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One event about a run."""

    name: str
    payload: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels of the resource."""


class RunEvents:
    """Hears the journal on one thread; says on another what is to be told by now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: float | None = None
        self._started_told = False
        self._incidents: deque[RunEvent] = deque(maxlen=_MOST_INCIDENTS)
        self._waiting_told = False
        self._capacity_changed: RunEvent | None = None
        self._committed_told: int | None = None
        self._next_progress = float("-inf")
        self._next_goodput = float("inf")

    def hear(self, item: JournalEvent | MetricsRecord) -> None:
        with self._lock:
            match item:
                case records.RunOpened():
                    self._opened = item.monotonic
                    self._committed_told = item.newest_commit
                    self._next_goodput = item.monotonic + GOODPUT_FROM_SECONDS
                case records.Incident():
                    facts = {"cause": item.cause, "hosts": list(item.host_ids), "step": item.step}
                    self._incidents.append(RunEvent(name=INCIDENT, payload=facts | {"message": item.message}))
                case records.CapacityChanged():
                    changed = item.model_dump(include={"offered", "usable", "source", "price_per_host_hour"})
                    self._capacity_changed = RunEvent(name=CAPACITY_CHANGED, payload=changed)
                case _:
                    pass

    def due(self, view: ProgressView, monotonic: float) -> list[RunEvent]:
        """What the run is to tell at this moment. What is returned counts as told."""
        with self._lock:
            if self._opened is None:
                return []
            return [
                *self._started(view),
                *self._incidents_so_far(),
                *self._newest_capacity(),
                *self._waiting(view),
                *self._progress(view, monotonic),
                *self._goodput(view, monotonic),
            ]

    def ended(self, view: ProgressView) -> list[RunEvent]:
        """The last thing to be told, if this process has opened the run at all."""
        with self._lock:
            if self._opened is None:
                return []
            return [RunEvent(name=ENDED, payload={"activity": view.activity, "detail": view.detail, "step": view.step})]

    def _started(self, view: ProgressView) -> list[RunEvent]:
        if self._started_told:
            return []
        self._started_told = True
        return [RunEvent(name=STARTED, payload={"step": view.step, "steps": view.steps})]

    def _incidents_so_far(self) -> list[RunEvent]:
        found = list(self._incidents)
        self._incidents.clear()
        return found

    def _waiting(self, view: ProgressView) -> list[RunEvent]:
        waiting = view.activity == "waiting for capacity"
        if waiting == self._waiting_told:
            return []
        self._waiting_told = waiting
        return [RunEvent(name=WAITING, payload={"reason": view.detail}) if waiting else RunEvent(name=RESUMED)]

    def _newest_capacity(self) -> list[RunEvent]:
        changed, self._capacity_changed = self._capacity_changed, None
        return [] if changed is None else [changed]

    def _progress(self, view: ProgressView, monotonic: float) -> list[RunEvent]:
        if view.committed_step == self._committed_told or monotonic < self._next_progress:
            return []
        self._committed_told = view.committed_step
        self._next_progress = monotonic + PROGRESS_INTERVAL_SECONDS
        return [RunEvent(name=PROGRESS, payload={"committed_step": view.committed_step, "steps": view.steps})]

    def _goodput(self, view: ProgressView, monotonic: float) -> list[RunEvent]:
        if view.goodput is None or monotonic < self._next_goodput:
            return []
        self._next_goodput = monotonic + GOODPUT_INTERVAL_SECONDS
        percent = str(int(100 * view.goodput))
        return [RunEvent(name=GOODPUT, payload={"goodput": view.goodput}, labels={GOODPUT_LABEL: percent})]
