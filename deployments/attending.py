"""Looks after the flow runs of a service: what died is found and continued even if no event told of it.

Prefect's automations act on events. An event is lost when the server dies with it, or comes when nobody listens; after
a restart of the server, the first change of a flow run's state may be held back for a quarter of an hour. So a service
looks as well: at the states that Prefect has, and at the processes of this machine.

- Running, but no process here executes it: Crashed.
- Crashed, without a process here, and nobody has continued it: scheduled again (`continue_crashed`).
- About to start, after its process died too often in a row before the flow began (broken installations, killers in the
  environment): Failed. The flow, which counts the deaths of a run that it has opened, is never reached then.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Crashed, Failed, Scheduled

LOG = logging.getLogger("prefect.shoal")

MOST_FALSE_STARTS = 5
LOOK_SECONDS = 10.0
# The automation, which comes at once if it comes, goes first.
_LEFT_ALONE = datetime.timedelta(seconds=20)
# What has been Crashed for longer than this was left so by somebody.
_FORGOTTEN = datetime.timedelta(days=1)
_FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


class Attendant:
    """Flow runs with `tag` that belong to `deployments`, all of which are executed on this machine and nowhere else."""

    def __init__(self, client: PrefectClient, tag: str, deployments: Sequence[UUID], *, continue_crashed: bool) -> None:
        self._client = client
        self._tag = tag
        self._deployments = list(deployments)
        self._continue_crashed = continue_crashed
        self._missed: set[UUID] = set()
        """Flow runs without a process at the last look."""

    async def attend(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._give_up_false_starts()
                await self._find_dead()
                if self._continue_crashed:
                    await self._continue_forgotten()
            except (httpx.HTTPError, PrefectException) as error:
                LOG.warning("cannot look after the flow runs: %r", error)

    async def _flow_runs(self, *types: StateType) -> list[FlowRun]:
        return await self._client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                tags=FlowRunFilterTags(all_=[self._tag]),
                deployment_id=FlowRunFilterDeploymentId(any_=self._deployments),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types))),
            )
        )

    async def _find_dead(self) -> None:
        """Two looks in a row, because a flow run may end, or be told to begin, between the list and the processes."""
        running = await self._flow_runs(StateType.RUNNING, StateType.CANCELLING)
        here = await asyncio.to_thread(flow_runs_here)
        missing = [run for run in running if run.id not in here]
        for run in missing:
            if run.id not in self._missed:
                continue
            state = (await self._client.read_flow_run(run.id)).state
            if state is None or run.state is None or state.id != run.state.id:
                continue
            LOG.warning("flow run %s has no process any more", run.name)
            cancelled = state.type == StateType.CANCELLING
            dead: State[Any] = (Cancelled if cancelled else Crashed)(message="Its process is gone.")
            await self._client.set_flow_run_state(run.id, dead)
        self._missed = {run.id for run in missing}

    async def _continue_forgotten(self) -> None:
        now = datetime.datetime.now(tz=datetime.UTC)
        crashed = await self._flow_runs(StateType.CRASHED)
        here = await asyncio.to_thread(flow_runs_here)  # one that trains says so itself: see tasks.watching
        for run in crashed:
            forgotten = run.state is not None and _LEFT_ALONE < now - run.state.timestamp < _FORGOTTEN
            if forgotten and run.id not in here:
                LOG.info("flow run %s has crashed and was not continued: scheduled again", run.name)
                await self._client.set_flow_run_state(
                    run.id, Scheduled(message="Its process died; continued by Shoal.")
                )

    async def _give_up_false_starts(self) -> None:
        # Between one death and the next a flow run is nearly always in one of these.
        for run in await self._flow_runs(*_ABOUT_TO_START):
            deaths = false_starts(await self._client.read_flow_run_states(run.id))
            if deaths > MOST_FALSE_STARTS:
                message = (
                    f"its process died {deaths} times in a row before the flow began; what it said is in the output of "
                    "the service. Retry tries again"
                )
                LOG.error("flow run %s: %s", run.name, message)
                await self._client.set_flow_run_state(run.id, Failed(message=message))


_ABOUT_TO_START = (StateType.SCHEDULED, StateType.PENDING)


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


def flow_runs_here() -> set[UUID]:
    """Flow runs that a process of this machine executes, as far as this user can see."""
    found = set()
    for process in psutil.process_iter():
        try:
            if "prefect.engine" in process.cmdline() and (flow_run := process.environ().get(_FLOW_RUN_VARIABLE)):
                found.add(UUID(flow_run))
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            continue
    return found
