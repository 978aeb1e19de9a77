"""The segment task: train from one checkpoint to the next, on whatever group there is."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from tasks.capacity import next_decision
from tasks.topology import resize_to
from trainer.control.controller import Controller, SegmentOutcome
from trainer.errors import SegmentFailedError
from trainer.planning.policy import Train
from trainer.records import PLANNED_CAUSES

# Prefect needs a number; the failure budget of the run, which `decide` applies, is the real limit.
_MOST_RETRIES = 1000


def failed_without_progress(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether Prefect should try again: infrastructure failures only, never the user's own errors."""
    return isinstance(state.data, SegmentFailedError)


@task(
    name="segment",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=_MOST_RETRIES,
    retry_delay_seconds=0,
    retry_condition_fn=failed_without_progress,
)
def train_segment(controller: Controller, until_step: int) -> SegmentOutcome | None:
    """Train up to `until_step` or as far as it gets.

    Takes no group: each attempt asks for a living one on the current plan and forms it if there is none, so that a
    retry never meets a dead group. Returns None if the present capacity allows no training; the loop then decides.

    Raises:
        SegmentFailedError: it failed without progress; Prefect retries it.
    """
    decision = next_decision(controller)
    if not isinstance(decision, Train):
        return None
    if controller.needs_resize(decision.topology):
        resize_to(controller, decision.topology)
    outcome = controller.train_segment(min(until_step, decision.until_step))
    if outcome.cause not in PLANNED_CAUSES and not outcome.progress:
        raise SegmentFailedError(outcome.message, cause=outcome.cause)
    return outcome


def run_segment(controller: Controller, decision: Train) -> SegmentOutcome | None:
    """Run `train_segment` under a name that tells the story: "segment 400→500 on 3 hosts"."""
    hosts = decision.topology.num_processes
    name = f"segment {decision.start_step}→{decision.until_step} on {hosts} {'host' if hosts == 1 else 'hosts'}"
    return train_segment.with_options(task_run_name=name)(controller, decision.until_step)
