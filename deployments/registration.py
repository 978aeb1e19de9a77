"""What a service puts into Prefect: deployments and automations. Made anew at each start, so that code is the truth."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    FlowRun,
    StateType,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron, Interval, Schedule
from prefect.states import Cancelled, Scheduled
from prefect.types.entrypoint import EntrypointType

from deployments.capacity_events import GROWTH_LABEL, pool_resource
from deployments.serve_config import AlertsConfig, ScheduleConfig, ServeConfig, ServedRun
from flows.evaluate import evaluate
from flows.rollback import rollback
from flows.scale import scale_up
from flows.train import train_run
from tasks import events
from trainer.config import RunConfig

TAG = "shoal"
"""On every deployment of a service. The automations act on flow runs that carry it, and on no others."""
CONTINUED_TAG = "shoal-continued"
"""On those whose flow runs are started again when their process died: they know when to stop trying."""
AUTOMATION_PREFIX = "shoal: "
"""Begins the name of every automation of a service."""
_PAGE = 200


# --- deployments ------------------------------------------------------------------------------------------------------


async def deployments(runs: Sequence[tuple[ServedRun, RunConfig]]) -> list[RunnerDeployment]:
    """The forms that ask for everything, and one deployment for each run that the service names."""
    found = [
        await train_run.ato_deployment(
            name="train",
            tags=[TAG, CONTINUED_TAG],
            description="Train a run, or continue the one of that name from its newest good state.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        await rollback.ato_deployment(
            name="rollback",
            tags=[TAG],
            description="Abandon what a run trained beyond a committed step. Asks before it acts; deletes nothing.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        await evaluate.ato_deployment(
            name="evaluate",
            tags=[TAG],
            description="Compute the loss of a checkpoint on held-out samples, also while the run trains.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
    ]
    for served, config in runs:
        schedule = served.schedule
        found.append(
            await train_run.ato_deployment(
                name=served.name,
                tags=[TAG, CONTINUED_TAG],
                description=f"The run {config.run_name} in {config.storage}.",
                parameters={
                    "config": config.model_dump(mode="json"),
                    "own_run_each_time": schedule is not None and schedule.own_run_each_time,
                },
                schedule=prefect_schedule(schedule) if schedule is not None else None,
                # The lease of the run is what protects it; this keeps the starts of one schedule from piling up.
                concurrency_limit=ConcurrencyLimitConfig(
                    limit=1,
                    collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
                    if schedule is not None and schedule.if_running == "queue"
                    else ConcurrencyLimitStrategy.CANCEL_NEW,
                ),
                entrypoint_type=EntrypointType.MODULE_PATH,
            )
        )
    return found


async def scale_up_deployment(config: ServeConfig, pool: str) -> RunnerDeployment:
    """Looks at the pool when its capacity has changed, and every now and then in case that went unheard."""
    return await scale_up.ato_deployment(
        name="scale-up",
        tags=[TAG],
        description="Give free hosts of the pool to the runs that can use them.",
        parameters={"reason": "by the clock"},
        schedule=Interval(datetime.timedelta(seconds=config.look_at_pool_seconds), timezone="UTC"),
        triggers=[
            DeploymentEventTrigger(
                name=f"scale-up when pool {pool} can grow",
                description="A hint: what is done depends on what the flow finds.",
                match={"prefect.resource.id": pool_resource(pool), GROWTH_LABEL: "possible"},
                expect={events.CAPACITY_CHANGED},
                posture=Posture.Reactive,
                threshold=1,
                within=datetime.timedelta(seconds=0),
                parameters={"reason": "capacity changed"},
            )
        ],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def prefect_schedule(schedule: ScheduleConfig) -> Schedule:
    if schedule.cron is not None:
        return Cron(schedule.cron, timezone=schedule.timezone)
    assert schedule.interval_seconds is not None
    # Anchored, so that a restart of the service does not move the grid.
    anchor = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    return Interval(
        datetime.timedelta(seconds=schedule.interval_seconds), timezone=schedule.timezone, anchor_date=anchor
    )


# --- automations ------------------------------------------------------------------------------------------------------

_FLOW_RUNS: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}


def _tagged(tag: str) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}


# Signs that a run which was Running is no longer expected to beat. Prefect's own documented set lacks the waiting ones,
# and would crash a run that is suspended or about to be started again.
_NO_LONGER_BEATING = (
    "Completed",
    "Failed",
    "Cancelled",
    "Crashed",
    "Cancelling",
    "Suspended",
    "Paused",
    "AwaitingRetry",
    "Scheduled",
    "Resuming",
)


def automations(config: ServeConfig) -> list[AutomationCore]:
    """What notices a flow process that died, and has its run continued."""
    return [no_sign_of_life(config.lost_after_seconds), *([CONTINUE_CRASHED] if config.continue_crashed else [])]


def no_sign_of_life(seconds: int) -> AutomationCore:
    return AutomationCore(
        name=f"{AUTOMATION_PREFIX}no sign of life",
        description=f"A flow run of Shoal that was Running and gave no sign of life for {seconds} s is Crashed: its "
        "machine or its runner is gone.",
        trigger=EventTrigger(
            match=_FLOW_RUNS,
            match_related=_tagged(TAG),
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.Running", "prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{name}" for name in _NO_LONGER_BEATING)},
            posture=Posture.Proactive,
            threshold=1,
            within=datetime.timedelta(seconds=seconds),
        ),
        actions=[
            ChangeFlowRunState(
                name=None, state=StateType.CRASHED, force=False, message=f"No sign of life for {seconds} s."
            )
        ],
    )


CONTINUE_CRASHED = AutomationCore(
    name=f"{AUTOMATION_PREFIX}continue what crashed",
    description="A flow run that trains and whose process died is scheduled again and goes on from its newest good "
    "state. Without progress that ends after elastic.max_failures: the flow itself then fails.",
    trigger=EventTrigger(
        match=_FLOW_RUNS,
        match_related=_tagged(CONTINUED_TAG),
        for_each={"prefect.resource.id"},
        expect={"prefect.flow-run.Crashed"},
        posture=Posture.Reactive,
        threshold=1,
        within=datetime.timedelta(seconds=0),
    ),
    actions=[
        ChangeFlowRunState(
            name=None, state=StateType.SCHEDULED, force=False, message="Its process died; continued by Shoal."
        )
    ],
)


# --- alerts -----------------------------------------------------------------------------------------------------------

_RUNS: dict[str, str | list[str]] = {"prefect.resource.id": f"{events.RESOURCE_PREFIX}*"}
_EACH_RUN = {"prefect.resource.id"}
_HOUR = datetime.timedelta(hours=1)


def alerts(config: AlertsConfig, notification_block: UUID | None) -> list[AutomationCore]:
    """What tells somebody to look, one automation for each kind that is switched on."""
    action = alert_action(notification_block)
    found = []
    if (incidents := config.incidents_per_hour) is not None:
        found.append(
            AutomationCore(
                name=f"{AUTOMATION_PREFIX}alert, incidents",
                description=f"{incidents} incidents of one run within an hour.",
                trigger=EventTrigger(
                    match=_RUNS, for_each=_EACH_RUN, expect={events.INCIDENT}, threshold=incidents, within=_HOUR
                ),
                actions=[action],
            )
        )
    if (bound := config.goodput_below) is not None:
        # Labels can be compared for equality only, so every percentage below the bound is listed.
        percentages = [str(percent) for percent in range(101) if percent < 100 * bound]
        found.append(
            AutomationCore(
                name=f"{AUTOMATION_PREFIX}alert, low goodput",
                description=f"Less than {bound:.0%} of the time of a run became steps.",
                trigger=EventTrigger(
                    match=_RUNS | {events.GOODPUT_LABEL: percentages},
                    for_each=_EACH_RUN,
                    expect={events.GOODPUT},
                    within=_HOUR,
                ),
                actions=[action],
            )
        )
    if (seconds := config.no_progress_seconds) is not None:
        found.append(
            AutomationCore(
                name=f"{AUTOMATION_PREFIX}alert, no progress",
                description=f"A run that does not wait for capacity committed nothing for {seconds:.0f} s.",
                trigger=EventTrigger(
                    match=_RUNS,
                    for_each=_EACH_RUN,
                    after={events.STARTED, events.RESUMED, events.PROGRESS},
                    expect={events.PROGRESS, events.WAITING, events.ENDED},
                    posture=Posture.Proactive,
                    within=datetime.timedelta(seconds=seconds),
                ),
                actions=[action],
            )
        )
    if (seconds := config.waiting_seconds) is not None:
        found.append(
            AutomationCore(
                name=f"{AUTOMATION_PREFIX}alert, waiting",
                description=f"A run waited for capacity for {seconds:.0f} s.",
                trigger=EventTrigger(
                    match=_RUNS,
                    for_each=_EACH_RUN,
                    after={events.WAITING},
                    expect={events.RESUMED, events.ENDED},
                    posture=Posture.Proactive,
                    within=datetime.timedelta(seconds=seconds),
                ),
                actions=[action],
            )
        )
    if config.failed_actions:
        found.append(
            AutomationCore(
                name=f"{AUTOMATION_PREFIX}alert, failed action",
                description="An automation could not act.",
                # Its own notification may be what failed: within an hour that leads to no second one.
                trigger=EventTrigger(
                    match={"prefect.resource.id": "prefect.automation.*"},
                    for_each={"prefect.resource.id"},
                    expect={"prefect.automation.action.failed"},
                    within=_HOUR,
                ),
                actions=[action],
            )
        )
    return found


def alert_action(notification_block: UUID | None) -> DoNothing | SendNotification:
    """Prefect shows each automation that was triggered in its event feed; an automation must have an action, though."""
    if notification_block is None:
        return DoNothing()
    return SendNotification(
        block_document_id=notification_block,
        subject="{{ automation.name }}",
        body="{{ automation.description }}\n\n{{ event.resource.name or event.resource.id }}: {{ event.payload }}",
    )


async def notification_block_id(client: PrefectClient, name: str) -> UUID | None:
    """Of a block `type/name`, or None if there is none on this server."""
    block_type, _, block_name = name.partition("/")
    try:
        return (await client.read_block_document_by_name(block_name, block_type, include_secrets=False)).id
    except ObjectNotFound:
        return None


# --- registering ------------------------------------------------------------------------------------------------------


async def register_automations(client: PrefectClient, wanted: Sequence[AutomationCore]) -> None:
    """Create them, bring those of the same name up to date, and delete those of ours that are no longer wanted."""
    existing = {automation.name: automation.id for automation in await client.read_automations(limit=_PAGE)}
    for automation in wanted:
        known = existing.pop(automation.name, None)
        if known is None:
            await client.create_automation(automation)
        else:
            await client.update_automation(known, _with_all_fields_set(automation))
    for name, identity in existing.items():
        if name.startswith(AUTOMATION_PREFIX):
            await client.delete_automation(identity)


def _with_all_fields_set(automation: AutomationCore) -> AutomationCore:
    """To update one, Prefect's client leaves out what was not set: the types of its trigger and actions too."""
    return AutomationCore.model_validate(automation.model_dump(exclude={"owner_resource"}))


# --- what a service finds when it starts ------------------------------------------------------------------------------


async def tidy_flow_runs(client: PrefectClient, served: Sequence[str]) -> list[str]:
    """Put right what the time without a service left behind. Returns what was done, a line each.

    `served` are the deployments of this service, as `flow/deployment`.

    Scheduled starts that were missed: only the newest of each deployment is made up for. Flow runs that a runner had
    fetched but not begun (Pending): they are scheduled again, nobody else would. Deployments of ours that this service
    no longer names are deleted, so that their schedules start nothing.
    """
    said = []
    now = datetime.datetime.now(tz=datetime.UTC)
    for deployment in await client.read_deployments(
        deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])), limit=_PAGE
    ):
        if deployment.work_pool_name is not None:
            continue  # of prefect.yaml: Prefect workers see to its flow runs
        of_deployment = FlowRunFilterDeploymentId(any_=[deployment.id])
        flow = await client.read_flow(deployment.flow_id)
        name = f"{flow.name}/{deployment.name}"
        if name not in served:
            await client.delete_deployment(deployment.id)
            said.append(f"deployment {name} is no longer served: removed")
            continue
        due = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=of_deployment,
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
                expected_start_time=FlowRunFilterExpectedStartTime.model_validate({"before_": now}),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=_PAGE,
        )
        for missed in [run for run in due if is_missed_start(run)][1:]:
            await client.set_flow_run_state(missed.id, Cancelled(message="Missed while the service was down."))
            said.append(f"missed start of {name} at {missed.expected_start_time}: not made up for")
        pending = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=of_deployment,
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])),
            ),
            limit=_PAGE,
        )
        for fetched in pending:
            await client.set_flow_run_state(fetched.id, Scheduled(message="Its runner ended before it began."))
            said.append(f"flow run {fetched.name} was fetched but never begun: scheduled again")
    return said


def is_missed_start(run: FlowRun) -> bool:
    """Made by a schedule and never begun. One that waits for its next attempt is no missed start."""
    return bool(run.auto_scheduled) and run.run_count == 0
