"""When a living group may grow: fed with events of a journal at times of the test's choosing, planned for real."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import records
from trainer.config import RunConfig, parse_config
from trainer.control.growth import GrowthWatch
from trainer.planning.capacity import Capacity
from trainer.planning.footprint import Footprint
from trainer.planning.policy import Hold
from trainer.planning.topology import Refusal, TopologyPlan, plan_topology

# Much work, so that more hosts are expected to be faster in proportion.
LARGE = Footprint(
    leaves=(),
    axis_rules={},
    flops_per_row=1e12,
    activation_bytes_per_row={"none": 10, "dots": 10, "full": 10},
    activation_tensor_fraction=0.0,
    tensor_reduce_bytes_per_row=0.0,
    remat_flops_factor={"none": 1.0, "dots": 1.0, "full": 1.0},
)
EVERY = Capacity.uniform(8, devices_per_host=2, hosts_per_slice=1)


class Watched:
    """A watch, its clock, and what it asked for."""

    def __init__(self, *, least: int = 1, most: int = 4, **elastic: Any) -> None:
        self.config: RunConfig = parse_config(
            {
                "run_name": "growth",
                "steps": 1000,
                "num_hosts": {"min": least, "max": most},
                "elastic": elastic,
            }
        )
        self.now = 100.0
        self.held: list[tuple[Hold, int]] = []
        self.wakes: list[float] = []
        self.step = 0
        self.topology: TopologyPlan | None = None
        self.watch = GrowthWatch(
            self.config,
            on_held=lambda hold, hosts: self.held.append((hold, hosts)),
            wake_in=self.wakes.append,
            clock=lambda: self.now,
        )

    def tell(self, kind: type[records.Event], **fields: Any) -> None:
        self.watch.observe(kind(time=0.0, monotonic=self.now, incarnation=1, **fields))

    def ready(self, *indices: int) -> None:
        for index in indices:
            self.tell(records.HostChanged, host_id=f"host-{index}", state="ready")

    def plan(self, capacity: Capacity) -> TopologyPlan | Refusal:
        return plan_topology(self.config, capacity, LARGE)

    def start(self, *indices: int, start_seconds: float = 10.0) -> None:
        """A group on these hosts, up to its first step."""
        topology = self.plan(present(*indices))
        assert isinstance(topology, TopologyPlan)
        self.topology = topology
        self.tell(records.GroupStarting, cause="start", topology=topology)
        self.now += start_seconds
        self.tell(records.FirstStep, step=self.step + 1)
        self.train(1, seconds=9.0)

    def train(self, steps: int, *, seconds: float) -> None:
        for _ in range(steps):
            self.step += 1
            self.now += seconds
            self.watch.observe(
                records.MetricsRecord(
                    step=self.step,
                    loss=1.0,
                    learning_rate=1.0,
                    samples=1,
                    tokens=1,
                    sample_digest="",
                    step_seconds=seconds,
                )
            )

    def reason(self, *indices: int) -> str:
        """Why the group should stop, these hosts being usable."""
        assert self.topology is not None
        return self.watch.resize_reason(self.topology, present(*indices), self.step, self.plan)


def present(*indices: int) -> Capacity:
    return Capacity(hosts=tuple(EVERY.hosts[index] for index in indices))


def test_without_settings_it_grows_at_once() -> None:
    run = Watched()
    run.ready(0, 1)
    run.start(0, 1)
    assert run.reason(0, 1) == ""
    run.ready(2)
    assert run.reason(0, 1, 2) == "3 hosts usable"
    assert (run.held, run.watch.held) == ([], None)


def test_a_newcomer_counts_when_it_has_been_usable_for_long_enough() -> None:
    run = Watched(grow_after_stable_seconds=30)
    run.ready(0, 1)
    run.start(0, 1)
    run.ready(2)
    run.now += 10.0
    run.ready(3)
    run.wakes.clear()
    for _ in range(3):
        assert run.reason(0, 1, 2, 3) == ""
    (told,) = run.held
    assert (told[0].rule, told[0].seconds, told[1]) == ("stable", 20.0, 4)
    assert set(run.wakes) == {20.0}
    run.now += 20.0
    assert run.reason(0, 1, 2, 3) == "3 hosts usable"
    run.now += 10.0
    assert run.reason(0, 1, 2, 3) == "4 hosts usable"


def test_a_host_that_was_away_starts_anew() -> None:
    run = Watched(grow_after_stable_seconds=7)
    run.ready(0, 1, 2)
    run.start(0, 1, 2)
    for _ in range(24):  # two minutes of 4↔3 every five seconds
        run.ready(3)
        assert run.reason(0, 1, 2, 3) == ""
        run.now += 5.0
        assert run.reason(0, 1, 2, 3) == ""
        assert run.reason(0, 1, 2) == ""
        run.now += 5.0
    run.ready(3)
    run.now += 7.0
    assert run.reason(0, 1, 2, 3) == "4 hosts usable"


def test_a_new_group_is_made_of_settled_hosts_if_they_are_enough() -> None:
    run = Watched(grow_after_stable_seconds=30, least=2)
    run.ready(0, 1)
    run.now += 40.0
    run.ready(2)
    assert run.watch.settled(present(0, 1, 2)) == present(0, 1)
    assert run.watch.settled(present(1, 2)) == present(1, 2), "one host would be less than num_hosts.min"


def test_leaving_hosts_are_acted_on_at_once_whatever_is_held() -> None:
    run = Watched(grow_after_stable_seconds=1000, min_dwell_seconds=1000, grow_payback_seconds=1)
    run.ready(0, 1, 2)
    run.start(0, 1)
    assert run.reason(0, 1, 2) == ""
    assert run.reason(0, 2) == "host-1 leaving"
    assert run.watch.held is None


def test_a_group_smaller_than_the_minimum_waits_for_nothing() -> None:
    run = Watched(grow_after_stable_seconds=1000, min_dwell_seconds=1000, grow_payback_seconds=1, least=3)
    run.ready(0, 1, 2)
    run.start(0, 1)
    assert run.reason(0, 1, 2) == "3 hosts usable"


def test_a_group_dwells_and_asks_to_be_woken_when_that_is_over() -> None:
    run = Watched(min_dwell_seconds=60)
    run.ready(0, 1, 2)
    run.start(0, 1)  # its first step is nine seconds old
    assert run.reason(0, 1, 2) == ""
    assert [(hold.rule, hold.seconds) for hold, _ in run.held] == [("dwell", 51.0)]
    assert run.wakes == [51.0]
    run.now += 51.0
    assert run.reason(0, 1, 2) == "3 hosts usable"


def test_a_resize_is_weighed_with_what_was_measured() -> None:
    run = Watched(grow_payback_seconds=200)
    run.ready(0, 1)
    run.start(0, 1, start_seconds=30.0)
    assert run.reason(0, 1, 2) == ""
    assert run.held[-1][0].reason == "the present steps are not measured yet"
    run.train(2, seconds=1.0)
    assert run.wakes == []
    run.train(1, seconds=1.0)
    assert run.wakes == [0.0], "a hold for want of measurements ends with the measurement"
    assert run.reason(0, 1, 2) == "3 hosts usable"  # a third of 200 s by the cost model, against the 30 s of the start
    run.tell(
        records.Recovered,
        **{"cause": "drained", "planned": True, "from_hosts": 2, "to_hosts": 3, "step": 4, "resumed_from": 4},
        down_seconds=70.0,
        phases={},
    )
    assert run.reason(0, 1, 2) == ""
    assert "a resize takes 70.0 s" in run.held[-1][0].reason


def test_a_topology_that_proved_slower_is_not_tried_again() -> None:
    run = Watched(grow_payback_seconds=1e6)
    run.ready(0, 1, 2)
    run.start(0, 1, 2)
    run.train(5, seconds=2.0)
    run.tell(records.GroupEnded, cause="drained", step=run.step)
    run.start(0, 1)
    run.train(5, seconds=1.0)
    assert run.reason(0, 1, 2) == ""
    assert "it would save 0.0 s" in run.held[-1][0].reason


def test_what_earlier_controllers_measured_counts() -> None:
    run = Watched(grow_payback_seconds=200)
    run.ready(0, 1)
    resize = {"cause": "drained", "from_hosts": 2, "to_hosts": 3, "step": 4, "resumed_from": 4, "phases": {}}
    events = [
        records.Recovered(time=0, monotonic=0, incarnation=1, planned=planned, down_seconds=seconds, **resize)
        for planned, seconds in ((True, 90.0), (False, 1.0))
    ]
    run.watch.learn(events)
    run.start(0, 1, start_seconds=1.0)
    run.train(5, seconds=1.0)
    assert run.reason(0, 1, 2) == ""
    assert run.held[-1][0].reason.count("a resize takes 90.0 s") == 1


@pytest.mark.parametrize("ending", ["the group ends", "the capacity goes"])
def test_a_hold_is_told_again_after_it_was_over(ending: str) -> None:
    run = Watched(min_dwell_seconds=600)
    run.ready(0, 1, 2)
    run.start(0, 1)
    assert run.reason(0, 1, 2) == run.reason(0, 1, 2) == ""
    assert len(run.held) == 1
    if ending == "the group ends":
        run.tell(records.GroupEnded, cause="host_lost", step=run.step)
        assert run.watch.held is None
        run.start(0, 1)
    else:
        assert run.reason(0, 1) == ""
        assert run.watch.held is None
    assert run.reason(0, 1, 2) == ""
    assert len(run.held) == 2
