"""Where a living run is, from what its journal says while it trains: for terminals, pages and dashboards.

Nothing is read from the run directory, so that asking costs nothing; `trainer.history` knows what came before.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

from trainer import records
from trainer.planning.topology import TopologyPlan
from trainer.records import JournalEvent, MetricsRecord

Activity = Literal[
    "starting",
    "training",
    "recovering",
    "resizing",
    "waiting for capacity",
    "stopping",
    "complete",
    "stopped",
    "failed",
]

# Steps behind the rates: long enough to be calm, short enough to follow a change of topology.
_RECENT_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class ProgressView:
    """One moment of a run. None: not known yet."""

    activity: Activity
    detail: str
    """Why it waits, stops or recovers; empty if there is nothing to say."""
    step: int
    """Last finished step."""
    steps: int
    loss: float | None
    step_seconds: float | None
    """Median of the newest steps of the newest group."""
    tokens_per_second: float | None
    topology: TopologyPlan | None
    """Of the worker group that trains or starts; None while the run waits for capacity."""
    committed_step: int | None
    goodput: float | None
    """Part of the time since this process opened the run that became steps, 0 to 1."""
    seconds_left: float | None
    """At the pace of the newest steps, without interruptions."""


class LiveProgress:
    """Fed with everything the journal tells, on one thread; may be looked at from any other."""

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._steps = steps
        self._activity: Activity = "starting"
        self._detail = ""
        self._step = 0
        self._loss: float | None = None
        self._recent: deque[MetricsRecord] = deque(maxlen=_RECENT_STEPS)
        self._topology: TopologyPlan | None = None
        self._committed: int | None = None
        self._opened: float | None = None
        self._productive_seconds = 0.0
        self._trained_to = 0

    def update(self, item: JournalEvent | MetricsRecord) -> None:
        with self._lock:
            match item:
                case MetricsRecord():
                    self._finish_step(item)
                case records.RunOpened():
                    self._opened = item.monotonic
                    self._steps = item.steps
                    self._committed = item.newest_commit
                    self._step = self._trained_to = item.newest_commit or 0
                case records.GroupStarting():
                    self._topology = item.topology
                    self._recent.clear()
                    self._turn_to("starting" if item.cause == "start" else "resizing")
                case records.GroupEnded(cause="drained"):
                    self._turn_to("resizing")
                case records.Incident():
                    self._turn_to("recovering", f"{item.cause.replace('_', ' ')}: {item.message}")
                case records.CheckpointCommitted():
                    self._committed = item.step
                case records.Waiting():
                    self._topology = None
                    self._recent.clear()
                    self._turn_to("waiting for capacity", item.reason)
                case records.StopRequested():
                    self._turn_to("stopping", item.reason)
                case records.RunEnded():
                    self._activity, self._detail = item.outcome, item.message
                case _:
                    pass

    def _turn_to(self, activity: Activity, detail: str = "") -> None:
        if self._activity != "stopping":  # steps and groups on the way to the stop do not change where it goes
            self._activity, self._detail = activity, detail

    def _finish_step(self, metrics: MetricsRecord) -> None:
        self._recent.append(metrics)
        self._step, self._loss = metrics.step, metrics.loss
        if metrics.step > self._trained_to:  # what is trained again after a rollback was counted before
            self._productive_seconds += metrics.step_seconds
            self._trained_to = metrics.step
        self._turn_to("training")

    def look(self, monotonic: float) -> ProgressView:
        """The run at this moment of the journal's monotonic clock, in seconds."""
        with self._lock:
            # The first step of a group includes its warm-up.
            seconds = [metrics.step_seconds for metrics in list(self._recent)[1:]]
            step_seconds = statistics.median(seconds) if seconds else None
            elapsed = 0.0 if self._opened is None else monotonic - self._opened
            return ProgressView(
                activity=self._activity,
                detail=self._detail,
                step=self._step,
                steps=self._steps,
                loss=self._loss,
                step_seconds=step_seconds,
                tokens_per_second=self._recent[-1].tokens / step_seconds if step_seconds else None,
                topology=self._topology,
                committed_step=self._committed,
                goodput=min(1.0, self._productive_seconds / elapsed) if elapsed > 0 else None,
                seconds_left=None if step_seconds is None else step_seconds * max(0, self._steps - self._step),
            )
