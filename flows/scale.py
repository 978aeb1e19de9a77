"""The scale-up flow: free hosts of the service's pool go to the runs that can use them."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact

from tasks.scaling import Enlargement, Growth, enlarge, follow, possible_orders, render_growth
from trainer.control.remote import RemotePool
from trainer.control.runtime import pool_of
from trainer.errors import RefusedError


@flow(name="scale-up", flow_run_name="scale up: {reason}", retries=0, persist_result=False)
def scale_up(reason: str = "looked", follow_seconds: float = 120.0) -> Any:
    """Look at the pool and give free hosts to runs that may grow. What it does depends on what it sees alone.

    So a change of capacity is only a reason to look, and so is the clock: a change that nobody heard of is found at the
    next look, and looking twice gives nothing twice. A run grows at its next step boundary and loses no step.

    Args:
        reason: Why it looks; for the name of the flow run.
        follow_seconds: How long to wait for the first step on the larger group, to tell what the growth cost.
    """
    began = time.time()
    logger = get_run_logger()
    pool_id = pool_of()
    if pool_id is None:
        raise RefusedError("this service keeps no pool: its configuration has no section `pool`")
    pool = RemotePool.find(pool_id)
    view = pool.view()
    orders = possible_orders(view)
    if not orders:
        logger.info("%d hosts, %d free: nothing to give", view.offered, len(view.free))
        return {}
    tenancies = {tenancy.tenancy: tenancy for tenancy in view.tenancies}
    given: list[Enlargement] = []
    for order in orders:
        tenancy = tenancies[order.tenancy]
        held, name = len(tenancy.hosts), tenancy.run.rpartition("/")[2]
        story = f"{name} {held}→{held + len(order.hosts)}: {', '.join(order.hosts)}"
        try:
            given.append(enlarge.with_options(task_run_name=story)(pool, order, tenancy))
        except RefusedError as error:
            logger.info("%s: %s", story, error)  # whoever was quicker has seen to it
    growths: list[Growth] = [
        follow.with_options(task_run_name=f"first step of {each.run_name} on {each.after} hosts")(each, follow_seconds)
        for each in given
    ]
    if growths:
        create_markdown_artifact(
            render_growth(growths, changed=view.time, began=began), key="shoal-scale-up", description="How a run grew"
        )
    return {each.run_name: each.after for each in given}
