"""The resize task: from the present worker group, living or dead, to one on the planned topology."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from trainer.control.controller import Controller, ResizeOutcome
from trainer.planning.topology import TopologyPlan


@task(name="resize", cache_policy=NO_CACHE, persist_result=False)
def resize(controller: Controller, topology: TopologyPlan) -> ResizeOutcome:
    """Ends the old group at a step boundary (or finds it dead), restores onto the new mesh, returns ready to step."""
    return controller.resize(topology)


def resize_to(controller: Controller, topology: TopologyPlan) -> ResizeOutcome:
    """Run `resize` under a name that tells the story: "resize 4→3: host-2 lost"."""
    name = f"resize {controller.resize_story(topology)}"
    return resize.with_options(task_run_name=name)(controller, topology)
