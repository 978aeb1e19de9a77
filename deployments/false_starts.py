"""Flow runs whose process dies each time before it begins: broken installations, killers in the environment.

The automation that continues what crashed has no memory, and the flow, which counts the deaths of a run that it has
opened, is never reached. So the runner looks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectException
from prefect.states import Failed

LOG = logging.getLogger("prefect.shoal")

MOST_FALSE_STARTS = 5
_LOOK_SECONDS = 10.0
# Between one death and the next a flow run is nearly always in one of these.
_ABOUT_TO_START = [StateType.SCHEDULED, StateType.PENDING]


async def give_up_false_starts(client: PrefectClient, tag: str) -> None:
    """For ever: fail flow runs with this tag whose process died too often in a row before the flow began."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            await _give_up(client, tag)
        except (httpx.HTTPError, PrefectException) as error:
            LOG.warning("cannot look for flow runs that die before they begin: %r", error)


async def _give_up(client: PrefectClient, tag: str) -> None:
    about_to_start = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ABOUT_TO_START)),
    )
    for flow_run in await client.read_flow_runs(flow_run_filter=about_to_start):
        deaths = false_starts(await client.read_flow_run_states(flow_run.id))
        if deaths > MOST_FALSE_STARTS:
            message = (
                f"its process died {deaths} times in a row before the flow began; what it said is in the output of the "
                "service. Retry tries again"
            )
            LOG.error("flow run %s: %s", flow_run.name, message)
            await client.set_flow_run_state(flow_run.id, Failed(message=message))


def false_starts(states: Sequence[State[Any]]) -> int:
    """How often the process of a flow run died in a row without having begun, up to now.

    Args:
        states: of the flow run, in any order. Other states than those of a process that is about to start or has died
            end the row: it ran, or somebody has decided something.
    """
    deaths = 0
    for state in sorted(states, key=lambda state: state.timestamp, reverse=True):
        if state.type == StateType.CRASHED:
            deaths += 1
        elif state.type not in _ABOUT_TO_START or state.name == "AwaitingRetry":
            break
    return deaths
