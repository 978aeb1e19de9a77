"""When a living group may grow: the clocks and measurements behind `trainer.planning.policy.growth_hold`."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping

from trainer import records
from trainer.config import RunConfig
from trainer.planning.capacity import Capacity
from trainer.planning.mesh import MeshShape
from trainer.planning.policy import Growth, Hold, grows, growth_hold, resize_reason, settled
from trainer.planning.topology import Refusal, TopologyPlan
from trainer.records import Event, MetricsRecord

# Steps of a topology that make a measurement, and how many of the newest are kept.
_ENOUGH_STEPS = 3
_KEPT_STEPS = 20
# Planned resizes behind what the next one is expected to cost.
_KEPT_RESIZES = 5

_Program = tuple[int, MeshShape, int, int, str]
_Planner = Callable[[Capacity], TopologyPlan | Refusal]


class GrowthWatch:
    """Listens to the journal for what it measures. Everything runs on the controller's event loop.

    Args:
        on_held: told of each hold once, with the number of hosts that is held back.
        wake_in: asked to have `resize_reason` called again after so many seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_held: Callable[[Hold, int], None],
        wake_in: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._on_held = on_held
        self._wake_in = wake_in
        self._clock = clock
        self._usable_since: dict[str, float] = {}
        self._topology: TopologyPlan | None = None
        self._starting_since = 0.0
        self._first_step: records.FirstStep | None = None
        self._start_seconds = 0.0
        self._resize_seconds: deque[float] = deque(maxlen=_KEPT_RESIZES)
        self._step_seconds: defaultdict[_Program, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_STEPS))
        self._told: tuple[str, int] | None = None
        self.held: Hold | None = None
        """What keeps the living group from growing now."""

    def learn(self, events: Iterable[Event]) -> None:
        """What earlier controllers of this run measured."""
        self._resize_seconds.extend(
            event.down_seconds for event in events if isinstance(event, records.Recovered) and event.planned
        )

    def observe(self, item: Event | MetricsRecord) -> None:
        """A listener of the journal."""
        match item:
            case records.HostChanged(state="ready"):
                self._usable_since[item.host_id] = item.monotonic
            case records.GroupStarting():
                self._topology, self._starting_since, self._first_step = item.topology, item.monotonic, None
                self._forget()
            case records.GroupEnded():
                self._forget()
            case records.FirstStep():
                self._first_step = item
                self._start_seconds = self._start_seconds or item.monotonic - self._starting_since
            case records.Recovered(planned=True):
                self._resize_seconds.append(item.down_seconds)
            case MetricsRecord():
                self._measure(item)
            case _:
                pass

    def _measure(self, metrics: MetricsRecord) -> None:
        assert self._topology is not None
        assert self._first_step is not None
        if metrics.step == self._first_step.step:
            return  # it includes the group's warm-up
        seconds = self._step_seconds[_program(self._topology)]
        seconds.append(metrics.step_seconds)
        if len(seconds) == _ENOUGH_STEPS:
            self._wake_in(0.0)

    def settled(self, capacity: Capacity) -> Capacity:
        """The hosts that a new group should be made of; see `trainer.planning.policy.settled`."""
        return settled(self._config, capacity, (), self._usable_seconds(capacity))

    def resize_reason(self, current: TopologyPlan, capacity: Capacity, step: int, plan: _Planner) -> str:
        """Why the living group, which has made a step, should stop now; "" if it should go on. Holds are told of."""
        everything = plan(capacity)
        if not grows(current, everything, capacity):
            self._forget()
            return resize_reason(current, everything, capacity)
        if current.num_processes < self._config.num_hosts.min:
            return resize_reason(current, everything, capacity)
        usable_seconds = self._usable_seconds(capacity)
        counted = settled(self._config, capacity, current.hosts, usable_seconds)
        larger = plan(counted)
        settles_in = 0.0
        if not grows(current, larger, counted):
            larger = everything
            settles_in = self._settles_in(usable_seconds, counted)
        assert isinstance(larger, TopologyPlan)
        hold = growth_hold(self._config.elastic, self._growth(current, larger, settles_in, step))
        if hold is None:
            self._forget()
            return resize_reason(current, larger, counted)
        self._hold(hold, larger.num_processes)
        return ""

    def _usable_seconds(self, capacity: Capacity) -> Mapping[str, float]:
        now = self._clock()
        return {host.host_id: now - self._usable_since.get(host.host_id, now) for host in capacity.hosts}

    def _settles_in(self, usable_seconds: Mapping[str, float], counted: Capacity) -> float:
        settled_hosts = {host.host_id for host in counted.hosts}
        longest = max(seconds for host_id, seconds in usable_seconds.items() if host_id not in settled_hosts)
        return self._config.elastic.grow_after_stable_seconds - longest

    def _growth(self, current: TopologyPlan, larger: TopologyPlan, settles_in: float, step: int) -> Growth:
        assert self._first_step is not None
        step_seconds = self._measured(current)
        larger_step_seconds = self._measured(larger)
        if larger_step_seconds is None and step_seconds is not None:
            # Never trained on: the cost model's ratio is worth more than its seconds.
            larger_step_seconds = step_seconds * larger.step_seconds_guess / current.step_seconds_guess
        return Growth(
            settles_in_seconds=settles_in,
            trained_seconds=self._clock() - self._first_step.monotonic,
            steps_left=self._config.steps - step,
            step_seconds=step_seconds,
            larger_step_seconds=larger_step_seconds,
            resize_seconds=statistics.median(self._resize_seconds or [self._start_seconds]),
        )

    def _measured(self, topology: TopologyPlan) -> float | None:
        seconds = self._step_seconds[_program(topology)]
        return statistics.median(seconds) if len(seconds) >= _ENOUGH_STEPS else None

    def _hold(self, hold: Hold, num_hosts: int) -> None:
        self.held = hold
        if hold.seconds is not None:
            self._wake_in(hold.seconds)
        if self._told != (hold.rule, num_hosts):
            self._told = (hold.rule, num_hosts)
            self._on_held(hold, num_hosts)

    def _forget(self) -> None:
        self.held = self._told = None


def _program(topology: TopologyPlan) -> _Program:
    """What step times depend on: everything but the names of the hosts."""
    return (
        topology.num_processes,
        topology.mesh,
        topology.num_microbatches,
        topology.rows_per_microbatch,
        topology.remat,
    )
