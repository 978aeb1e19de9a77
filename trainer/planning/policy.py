"""What to do next: pure decisions of the training loop and of a running segment."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import RunConfig
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
