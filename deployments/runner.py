"""The process of a service that executes flow runs: registers what is served, then polls Prefect for what is due.

    python -P -m deployments.runner SERVE_CONFIG

Started and restarted by `deployments.serve`. It may be killed at any moment: each flow run is a process of its own that
goes on without it and reports to Prefect itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.runner import Runner

from deployments.attending import Attendant
from deployments.capacity_events import tell_capacity_changes
from deployments.registration import (
    CONTINUED_TAG,
    alerts,
    automations,
    deployments,
    notification_block_id,
    register_automations,
    scale_up_deployment,
    tidy_flow_runs,
)
from deployments.serve_config import load_serve_config, load_served_runs
from trainer.control.runtime import pool_of
from trainer.permits import PERMITS_VARIABLE

LOG = logging.getLogger("prefect.shoal")  # below Prefect's own logger, whose handlers and format it takes


async def run(path: Path) -> None:
    config = load_serve_config(path)
    # The flow processes inherit it.
    os.environ[PERMITS_VARIABLE] = config.allow.model_dump_json()
    wanted = await deployments(load_served_runs(path, config))
    if (pool := pool_of()) is not None:
        wanted.append(await scale_up_deployment(config, pool))
    runner = Runner(
        name="shoal",
        query_seconds=config.poll_seconds,
        heartbeat_seconds=config.heartbeat_seconds,
        limit=config.max_flow_runs,
        pause_on_shutdown=False,
    )
    async with get_client() as client:
        for line in await tidy_flow_runs(client, [deployment.full_name for deployment in wanted]):
            LOG.info(line)
        ids = [await runner.aadd_deployment(deployment) for deployment in wanted]
        block = None
        if (name := config.alerts.notification_block) is not None:
            block = await notification_block_id(client, name)
            if block is None:  # no reason to train nothing
                LOG.warning("alerts.notification_block: the server has no block %s; alerts are in its event feed", name)
        await register_automations(client, [*automations(config), *alerts(config.alerts, block)])
    LOG.info("serving %s", ", ".join(deployment.full_name for deployment in wanted))
    async with get_client() as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.start())
        attendant = Attendant(client, CONTINUED_TAG, ids, continue_crashed=config.continue_crashed)
        tasks.create_task(attendant.attend())
        if pool is not None:
            tasks.create_task(tell_capacity_changes(pool))


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
