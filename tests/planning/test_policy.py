"""What the loop does next, and when a living group should stop for another topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ElasticConfig, RunConfig, parse_config
from trainer.planning.capacity import Capacity
from trainer.planning.footprint import Footprint
from trainer.planning.policy import (
    Finish,
    GiveUp,
    Growth,
    Situation,
    Train,
    Wait,
    decide,
    grows,
    growth_hold,
    resize_reason,
    settled,
)
from trainer.planning.topology import Refusal, TopologyPlan, plan_topology

# Hardly any work, so that communication outweighs it: hosts must be used all the same.
SMALL = Footprint(
    leaves=(),
    axis_rules={},
    flops_per_row=10.0,
    activation_bytes_per_row={"none": 10, "dots": 10, "full": 10},
    activation_tensor_fraction=0.0,
    tensor_reduce_bytes_per_row=0.0,
    remat_flops_factor={"none": 1.0, "dots": 1.0, "full": 1.0},
)


def config(**changes: Any) -> RunConfig:
    return parse_config({"run_name": "policy", "steps": 100, "checkpoint": {"save_interval_steps": 10}, **changes})


def capacity(*indices: int) -> Capacity:
    every = Capacity.uniform(8, devices_per_host=2, hosts_per_slice=1)
    return Capacity(hosts=tuple(every.hosts[index] for index in indices))


def planned(run_config: RunConfig, hosts: Capacity) -> TopologyPlan | Refusal:
    return plan_topology(run_config, hosts, SMALL)


def situation(run_config: RunConfig, hosts: Capacity, **changes: Any) -> Situation:
    values: dict[str, Any] = {
        "step": 0,
        "committed_step": 0,
        "failures_without_progress": 0,
        "last_failure_cause": "host_lost",
        "waited_seconds": 0.0,
        "capacity": hosts,
        "plan": planned(run_config, hosts),
        "last_topology": None,
    }
    return Situation(**values | changes)


@given(st.integers(0, 99), st.sets(st.integers(0, 3), min_size=1))
def test_with_hosts_and_budget_it_trains_to_the_next_boundary(step: int, indices: set[int]) -> None:
    hosts = capacity(*sorted(indices))
    decision = decide(config(), situation(config(), hosts, step=step))
    assert isinstance(decision, Train)
    assert (decision.start_step, decision.until_step) == (step, (step // 10 + 1) * 10)
    assert set(decision.topology.hosts) <= {host.host_id for host in hosts.hosts}


def test_it_is_finished_only_when_the_last_step_is_committed() -> None:
    hosts = capacity(0)
    assert isinstance(decide(config(), situation(config(), hosts, committed_step=100)), Finish)
    assert not isinstance(decide(config(), situation(config(), hosts, step=100, committed_step=90)), Finish)


def test_a_finished_run_needs_neither_hosts_nor_budget() -> None:
    finished = situation(config(), capacity(), committed_step=100, failures_without_progress=99, waited_seconds=1e9)
    assert isinstance(decide(config(), finished), Finish)


def test_the_budget_allows_max_failures_in_a_row_and_names_the_last_cause() -> None:
    run_config = config(elastic={"max_failures": 2})
    assert isinstance(decide(run_config, situation(run_config, capacity(0), failures_without_progress=2)), Train)
    decision = decide(run_config, situation(run_config, capacity(0), failures_without_progress=3))
    assert isinstance(decision, GiveUp)
    assert decision.cause == "host_lost"
    assert "elastic.max_failures: 2" in decision.reason


def test_too_few_hosts_are_waited_for_until_the_waiting_time_is_spent() -> None:
    run_config = config(num_hosts={"min": 3}, elastic={"wait_for_capacity_seconds": 60})
    waiting = decide(run_config, situation(run_config, capacity(0, 2), waited_seconds=20.0))
    assert isinstance(waiting, Wait)
    assert (waiting.usable, waiting.needed, waiting.seconds) == (2, 3, 40.0)
    spent = decide(run_config, situation(run_config, capacity(0, 2), waited_seconds=60.0))
    assert isinstance(spent, GiveUp)
    assert spent.cause == "no_capacity"


def test_in_pause_mode_it_waits_for_the_hosts_of_the_last_topology_by_name() -> None:
    run_config = config(elastic={"mode": "pause"})
    last = planned(run_config, capacity(0, 1, 2))
    paused = decide(run_config, situation(run_config, capacity(0, 2, 3), last_topology=last, plan=last))
    assert isinstance(paused, Wait)
    assert "host-1" in paused.reason
    back = decide(run_config, situation(run_config, capacity(0, 1, 2, 3), last_topology=last, plan=last))
    assert isinstance(back, Train)
    assert back.topology == last


def test_a_living_group_grows_even_when_communication_outweighs_its_work() -> None:
    current = planned(config(), capacity(0, 1, 2))
    assert isinstance(current, TopologyPlan)
    assert resize_reason(current, planned(config(), capacity(0, 1, 2, 3)), capacity(0, 1, 2, 3)) == "4 hosts usable"


@given(st.sets(st.integers(0, 7), min_size=1))
def test_a_group_on_what_the_planner_would_choose_goes_on(indices: set[int]) -> None:
    hosts = capacity(*sorted(indices))
    current = planned(config(num_hosts={"max": 8}), hosts)
    assert isinstance(current, TopologyPlan)
    assert resize_reason(current, current, hosts) == ""


def test_other_hosts_for_the_same_program_are_no_reason_to_stop() -> None:
    run_config = config(num_hosts={"max": 3})
    current = planned(run_config, capacity(1, 2, 3))
    assert isinstance(current, TopologyPlan)
    assert resize_reason(current, planned(run_config, capacity(0, 1, 2, 3)), capacity(0, 1, 2, 3)) == ""


def test_a_group_whose_host_leaves_stops_whatever_could_be_planned() -> None:
    current = planned(config(), capacity(0, 1, 2))
    assert isinstance(current, TopologyPlan)
    refusal = Refusal(reason="nothing fits", needed="more")
    assert resize_reason(current, refusal, capacity(0, 2)) == "host-1 leaving"
    assert resize_reason(current, refusal, capacity(0, 1, 2)) == ""


# --- growth ----------------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 1000)


def elastic(**changes: Any) -> ElasticConfig:
    return ElasticConfig.model_validate(changes)


def growth(**changes: Any) -> Growth:
    values: dict[str, Any] = {
        "settles_in_seconds": 0.0,
        "trained_seconds": 1000.0,
        "steps_left": 1000,
        "step_seconds": 1.0,
        "larger_step_seconds": 0.75,
        "resize_seconds": 20.0,
    }
    return Growth(**values | changes)


growths = st.builds(
    Growth,
    settles_in_seconds=SECONDS,
    trained_seconds=SECONDS,
    steps_left=st.integers(0, 10_000),
    step_seconds=st.none() | st.floats(0.001, 100),
    larger_step_seconds=st.none() | st.floats(0.001, 100),
    resize_seconds=SECONDS,
)
elastics = st.builds(
    ElasticConfig,
    grow_after_stable_seconds=SECONDS,
    min_dwell_seconds=SECONDS,
    grow_payback_seconds=st.none() | st.floats(0.1, 1e6),
)


def test_by_default_nothing_keeps_a_group_from_growing() -> None:
    assert growth_hold(ElasticConfig(), growth(trained_seconds=0.0, step_seconds=None, resize_seconds=1e9)) is None


@given(elastics, growths)
def test_a_hold_names_when_it_ends_and_nothing_of_time_is_left_then(settings: ElasticConfig, now: Growth) -> None:
    hold = growth_hold(settings, now)
    if hold is None or hold.seconds is None:
        assert now.settles_in_seconds == 0
        assert now.trained_seconds >= settings.min_dwell_seconds
        return
    assert hold.seconds > 0
    later = replace(
        now,
        settles_in_seconds=max(0.0, now.settles_in_seconds - hold.seconds),
        trained_seconds=now.trained_seconds + hold.seconds + 1e-6,  # floats: the sum may fall just short
    )
    after = growth_hold(settings, later)
    assert after is None or after.rule == "payback"


@given(elastics, growths, st.floats(1, 10))
def test_what_costs_more_or_saves_less_is_held_as_well(settings: ElasticConfig, now: Growth, factor: float) -> None:
    if growth_hold(settings, now) is not None:
        dearer = replace(now, resize_seconds=now.resize_seconds * factor)
        sooner_over = replace(now, steps_left=int(now.steps_left / factor))
        assert growth_hold(settings, dearer) is not None
        assert growth_hold(settings, sooner_over) is not None


def test_a_resize_must_pay_for_itself_within_the_horizon_or_the_run() -> None:
    assert growth_hold(elastic(grow_payback_seconds=81), growth()) is None  # saves a quarter of 81 s
    held = growth_hold(elastic(grow_payback_seconds=79), growth())
    assert held is not None
    assert (held.rule, held.seconds) == ("payback", None)
    assert "save 19.8 s in 79 s and a resize takes 20.0 s" in held.reason
    assert growth_hold(elastic(grow_payback_seconds=1e6), growth(steps_left=81)) is None
    assert growth_hold(elastic(grow_payback_seconds=1e6), growth(steps_left=79)) is not None


def test_a_larger_group_that_is_no_faster_never_pays() -> None:
    for resize_seconds in (1.0, 1e-6):
        assert growth_hold(
            elastic(grow_payback_seconds=1e6), growth(larger_step_seconds=1.0, resize_seconds=resize_seconds)
        )


def test_what_is_not_measured_yet_is_not_paid_for() -> None:
    held = growth_hold(elastic(grow_payback_seconds=100), growth(step_seconds=None))
    assert held is not None
    assert "not measured yet" in held.reason


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.lists(SECONDS, min_size=8, max_size=8), SECONDS)
def test_hosts_count_when_used_or_usable_for_long_and_all_of_them_when_too_few_do(
    present: set[int], in_use: set[int], usable: list[float], stable: float
) -> None:
    run_config = config(num_hosts={"min": 3, "max": 8}, elastic={"grow_after_stable_seconds": stable})
    hosts = capacity(*sorted(present))
    usable_seconds = {f"host-{index}": usable[index] for index in present}
    counted = settled(run_config, hosts, [f"host-{index}" for index in in_use], usable_seconds)
    old = {f"host-{index}" for index in present if index in in_use or usable[index] >= stable}
    expected = old if len(old) >= 3 else set(usable_seconds)
    assert {host.host_id for host in counted.hosts} == expected


def test_settled_hosts_of_broken_slices_are_not_enough() -> None:
    run_config = config(
        num_hosts={"min": 2, "max": 8}, engine={"hosts_per_slice": 2}, elastic={"grow_after_stable_seconds": 5}
    )
    every = Capacity.uniform(4, devices_per_host=2, hosts_per_slice=2)
    old = {"host-0": 9.0, "host-2": 9.0}
    assert settled(run_config, every, (), old) == every
    assert len(settled(run_config, every, (), old | {"host-1": 9.0}).hosts) == 3


@given(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 3), min_size=1))
def test_only_what_could_wait_is_growth(before: set[int], now: set[int]) -> None:
    current, plan = planned(config(), capacity(*sorted(before))), planned(config(), capacity(*sorted(now)))
    assert isinstance(current, TopologyPlan)
    assert grows(current, plan, capacity(*sorted(now))) == (now > before)
