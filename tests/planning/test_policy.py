"""What the loop does next, and when a living group should stop for another topology."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.config import RunConfig, parse_config
from trainer.planning.capacity import Capacity
from trainer.planning.footprint import Footprint
from trainer.planning.policy import Finish, GiveUp, Situation, Train, Wait, decide, resize_reason
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
