"""Tasks that look at the pool: what to do next, and waiting for hosts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from trainer.control.controller import Controller
from trainer.planning.policy import Decision, Wait, decide


def next_decision(controller: Controller) -> Decision:
    """Not a task: it takes milliseconds and nobody looks for it in the timeline."""
    return decide(controller.config, controller.situation())


@task(
    name="wait-for-capacity",
    task_run_name="wait for capacity: {reason}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def wait_for_capacity(controller: Controller, wait: Wait, reason: str) -> None:
    """Ends when the pool's capacity changes, or when the waiting time of the run is used up."""
    controller.wait_for_capacity(usable=wait.usable, needed=wait.needed, reason=reason, seconds=wait.seconds)
