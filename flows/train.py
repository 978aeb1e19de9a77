"""The training flow: decide, resize, train a segment, and again until the last step is committed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from typing import Any

from prefect import flow, get_run_logger
from prefect.exceptions import Abort, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from tasks.capacity import next_decision, wait_for_capacity
from tasks.leaving import leave
from tasks.report import publish_report
from tasks.segment import run_segment
from tasks.topology import resize_to
from tasks.watching import watching
from trainer.config import RunConfig, parse_config
from trainer.control.controller import Controller
from trainer.control.engines.local import measured_device_memory
from trainer.control.lease import is_held
from trainer.control.prometheus import serving_metrics
from trainer.control.run import completed_step, open_run
from trainer.control.runtime import pool_of
from trainer.control.signals import stopping_on_signals
from trainer.description import describe_job
from trainer.errors import BudgetSpentError, LeaseError, SegmentFailedError, ShoalError, StoppedError
from trainer.permits import permits_of
from trainer.planning.policy import Finish, GiveUp, Train, Wait
from trainer.report import report_is_current
from trainer.store import run_store

LOG = logging.getLogger("shoal")


@flow(name="train", flow_run_name="train {config.run_name}", retries=0, persist_result=False, validate_parameters=True)
def train_run(config: RunConfig, own_run_each_time: bool = False) -> Any:
    """Train a run, or continue it from its newest good state.

    Start, resume after a crash, shrink, grow and retry are all the next turn of this loop; there is no second path.
    A stop by signal ends the flow run Cancelled, with its state saved; every other early end fails it with the reason.
    A SIGTERM from Prefect's side (its runner or the machine is ending) saves too, and leaves the flow run waiting for
    its next attempt.

    Args:
        config: What to train. The same run name continues the same run.
        own_run_each_time: Add the time that this flow run was scheduled for to the run name, so that each start of a
            schedule trains a run of its own. A retry keeps the name.
    """
    logger = get_run_logger()
    if own_run_each_time:
        config = named_by_time(config, flow_run.scheduled_start_time)
    if (permits := permits_of()) is not None:
        permits.check(config)
    if (step := completed_step(config)) is not None:
        logger.info("run %s is complete at step %d already; nothing to do", config.run_name, step)
        store = run_store(config.storage, config.run_name)
        if not is_held(store) and not report_is_current(store):  # its process died before it had written it
            publish_report(store)
        return {"run": config.run_name, "step": step}
    description = describe_job(config)
    run = open_run(config, description, device_memory_bytes=measured_device_memory(config))
    controller = Controller(run, description, pool=pool_of(), started_by=flow_run.id)
    with stopping_on_signals(controller), serving_metrics(run.config), watching(run) as watcher:
        try:
            with controller:
                try:
                    train(controller)
                except TerminationSignal as signal:
                    leave(controller, watcher, signal)
        except LeaseError as error:
            if error.started_by == flow_run.id:
                # Prefect took that process for dead, as after an outage of its server, and started this one. The state
                # of the flow run is the other's to set: it ends as the training does.
                raise Abort(f"another process trains for this flow run already: {error}") from error
            raise  # the run is another's, and so is its report
        except StoppedError as error:
            publish_report(run.store)
            return Cancelled(message=str(error))
        except ShoalError:
            with contextlib.suppress(ShoalError):  # why the run ended matters more than its report
                publish_report(run.store)
            raise
        publish_report(run.store)
    return {"run": config.run_name, "step": run.config.steps, "directory": run.store.location}


def named_by_time(config: RunConfig, time: datetime.datetime) -> RunConfig:
    """Raises ConfigError if the name becomes too long."""
    name = f"{config.run_name}-{time.astimezone(datetime.UTC):%Y%m%dT%H%M%SZ}"
    return parse_config(config.model_dump(mode="json") | {"run_name": name})


def train(controller: Controller) -> None:
    """The loop of DESIGN section 4.

    Raises:
        BudgetSpentError: too many failures without progress, or too long without capacity.
        UserCodeError, StoppedError, LeaseError, StorageError: as the controller reports them.
    """
    try:
        while not is_finished(controller):
            pass
    except TerminationSignal:
        raise  # the run has not ended yet: it stops and saves first
    except BaseException as error:
        controller.record_end(error)
        raise
    controller.record_end(None)


def is_finished(controller: Controller) -> bool:
    """Decide and act until the last step is committed, or until Prefect interrupts: False then, and nothing is lost."""
    try:
        while not isinstance(decision := next_decision(controller), Finish):
            match decision:
                case GiveUp():
                    raise BudgetSpentError(decision.reason, cause=decision.cause)
                case Wait():
                    wait_for_capacity(controller, decision, decision.reason)
                case Train():
                    advance(controller, decision)
    except asyncio.CancelledError:
        # Thrown into this thread, once at most, by the part of Prefect's engine that keeps the deployment's
        # concurrency slot: the slot was given away while the server was out of reach. The run's lease is still ours.
        LOG.warning("Prefect no longer counts this flow run among those of its deployment; training goes on")
        controller.wait_interrupted()
        return False
    return True


def advance(controller: Controller, decision: Train) -> None:
    """One segment, with a resize before it if the living group does not fit the plan.

    A failure without progress is not raised: the controller has counted it, and the next decision knows whether the
    budget allows another try.
    """
    with contextlib.suppress(SegmentFailedError):
        if controller.needs_resize(decision.topology):
            resize_to(controller, decision.topology)
        run_segment(controller, decision)
