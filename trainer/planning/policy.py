"""What to do next: pure decisions of the training loop and of a running segment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.config import ElasticConfig, RunConfig
from trainer.planning.capacity import Capacity
from trainer.planning.segment import next_boundary
from trainer.planning.topology import Refusal, TopologyPlan


@dataclass(frozen=True, kw_only=True)
class Train:
    """Run a segment on this topology, resizing first if the living group has another."""

    topology: TopologyPlan
    start_step: int
    until_step: int


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing can be trained now: wait for a change of capacity, at most this long."""

    usable: int
    needed: int
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Every step is trained and committed."""


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """A budget is spent."""

    reason: str
    cause: str
    """What spent it, in the words of `trainer.records.Cause`."""


Decision = Train | Wait | Finish | GiveUp


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the loop knows when it decides."""

    step: int
    """Step that the next segment starts from: the living group's, or the newest usable commit's."""
    committed_step: int
    failures_without_progress: int
    last_failure_cause: str
    waited_seconds: float
    """How long the run has been waiting for capacity without a break."""
    capacity: Capacity
    plan: TopologyPlan | Refusal
    """For this capacity."""
    last_topology: TopologyPlan | None
    """Of the last group, for the pause mode."""


def decide(config: RunConfig, situation: Situation) -> Decision:
    """The next thing for the training loop to do."""
    if situation.committed_step >= config.steps:
        return Finish()
    if situation.failures_without_progress > config.elastic.max_failures:
        return GiveUp(
            reason=f"{situation.failures_without_progress} failures in a row without a newly committed step "
            f"(elastic.max_failures: {config.elastic.max_failures})",
            cause=situation.last_failure_cause,
        )
    usable = len(situation.capacity.hosts)
    needed, reason = hosts_needed(config, situation)
    if reason:
        left = config.elastic.wait_for_capacity_seconds - situation.waited_seconds
        if left <= 0:
            return GiveUp(
                reason=f"{reason}; waited {situation.waited_seconds:.0f} s "
                f"(elastic.wait_for_capacity_seconds: {config.elastic.wait_for_capacity_seconds:.0f})",
                cause="no_capacity",
            )
        return Wait(usable=usable, needed=needed, reason=reason, seconds=left)
    assert isinstance(situation.plan, TopologyPlan)
    return Train(
        topology=situation.plan,
        start_step=situation.step,
        until_step=next_boundary(situation.step, config.steps, config.checkpoint.save_interval_steps),
    )


def hosts_needed(config: RunConfig, situation: Situation) -> tuple[int, str]:
    """How many hosts are needed to go on and, if they are not there, why not."""
    usable = len(situation.capacity.hosts)
    if config.elastic.mode == "pause" and situation.last_topology is not None:
        missing = sorted(set(situation.last_topology.hosts) - {host.host_id for host in situation.capacity.hosts})
        needed = len(situation.last_topology.hosts)
        if missing:
            return needed, f"waiting for {', '.join(missing)} (elastic.mode: pause)"
        return needed, ""
    needed = config.num_hosts.min
    if usable < needed:
        return needed, f"{usable} usable hosts, num_hosts.min is {needed}"
    if isinstance(situation.plan, Refusal):
        return needed, f"{situation.plan.reason}; {situation.plan.needed}"
    return needed, ""


def resize_reason(current: TopologyPlan, plan: TopologyPlan | Refusal, capacity: Capacity) -> str:
    """Why a living group should stop for another topology, or "" if it should go on.

    It stops when a host it uses is leaving, or when the planner would now choose another program; other hosts for the
    same program are no reason.
    """
    usable = {host.host_id for host in capacity.hosts}
    leaving = [host for host in current.hosts if host not in usable]
    if leaving:
        return f"{', '.join(leaving)} leaving"
    if isinstance(plan, Refusal) or plan.model_copy(update={"hosts": current.hosts}).same_program(current):
        return ""
    return f"{plan.num_processes} hosts usable"


def grows(current: TopologyPlan, plan: TopologyPlan | Refusal, capacity: Capacity) -> bool:
    """Whether `plan` is a reason to stop that could wait: no host leaves, and the next group would not be smaller."""
    usable = {host.host_id for host in capacity.hosts}
    return (
        isinstance(plan, TopologyPlan)
        and plan.num_processes >= current.num_processes
        and usable.issuperset(current.hosts)
        and resize_reason(current, plan, capacity) != ""
    )


def settled(
    config: RunConfig, capacity: Capacity, in_use: Collection[str], usable_seconds: Mapping[str, float]
) -> Capacity:
    """The hosts that count for a plan, where newcomers may be gone again in a moment.

    These are the hosts `in_use` and those usable for `elastic.grow_after_stable_seconds`; but all of them where those
    would not be `num_hosts.min`: a run that has too little waits for nothing.
    """
    counted = Capacity(
        hosts=tuple(
            host
            for host in capacity.hosts
            if host.host_id in in_use
            or usable_seconds.get(host.host_id, 0.0) >= config.elastic.grow_after_stable_seconds
        )
    )
    enough = sum(len(hosts) for hosts in counted.whole_slices(config.engine.hosts_per_slice)) >= config.num_hosts.min
    return counted if enough else capacity


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A larger topology that a living group could have, and what is known of both."""

    settles_in_seconds: float
    """Until the next of its new hosts has been usable for long enough. 0: it needs no other hosts than settled ones."""
    trained_seconds: float
    """Since the living group's first step."""
    steps_left: int
    step_seconds: float | None
    """Of the living group. None: not measured yet."""
    larger_step_seconds: float | None
    """Expected of the larger one."""
    resize_seconds: float
    """What a planned resize costs, from the last step before to the first after it."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Why a group does not grow yet."""

    rule: Literal["stable", "dwell", "payback"]
    reason: str
    seconds: float | None
    """Until it ends by time alone. None: it does not."""


def growth_hold(elastic: ElasticConfig, growth: Growth) -> Hold | None:
    """Whether a larger group has to wait. Not asked for a group that is smaller than `num_hosts.min`."""
    dwell_seconds = elastic.min_dwell_seconds - growth.trained_seconds
    if growth.settles_in_seconds > 0 and growth.settles_in_seconds >= dwell_seconds:
        return Hold(
            rule="stable",
            reason=f"new hosts count after {elastic.grow_after_stable_seconds:g} s (elastic.grow_after_stable_seconds)",
            seconds=growth.settles_in_seconds,
        )
    if dwell_seconds > 0:
        return Hold(
            rule="dwell",
            reason=f"a group trains {elastic.min_dwell_seconds:g} s before it grows (elastic.min_dwell_seconds)",
            seconds=dwell_seconds,
        )
    return None if elastic.grow_payback_seconds is None else _payback_hold(elastic.grow_payback_seconds, growth)


def _payback_hold(payback_seconds: float, growth: Growth) -> Hold | None:
    if growth.step_seconds is None or growth.larger_step_seconds is None:
        return Hold(rule="payback", reason="the present steps are not measured yet", seconds=None)
    horizon = min(payback_seconds, growth.steps_left * growth.step_seconds)
    saved = horizon * (1 - growth.larger_step_seconds / growth.step_seconds)
    if saved >= growth.resize_seconds:
        return None
    return Hold(
        rule="payback",
        reason=f"it would save {max(0.0, saved):.1f} s in {horizon:.0f} s and a resize takes "
        f"{growth.resize_seconds:.1f} s (elastic.grow_payback_seconds)",
        seconds=None,
    )
