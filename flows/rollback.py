"""The rollback flow: shows what would be abandoned, waits for somebody to confirm it, and does it."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Cancelled
from pydantic import Field

from trainer.config import RUN_NAME_PATTERN
from trainer.control.rollback import RollbackPlan, check_not_held, plan_rollback, roll_back
from trainer.errors import RefusedError
from trainer.permits import permits_of
from trainer.store import run_store


class Confirmation(RunInput):
    """The form that the person fills in."""

    confirm: bool = Field(default=False, description="Roll the run back. Left out: nothing is done.")
    note: str = Field(default="", description="Kept with the run, after the reason.")


@flow(name="rollback", flow_run_name="rollback {run_name}", retries=0, persist_result=False, validate_parameters=True)
def rollback(
    storage: str,
    run_name: Annotated[str, Field(pattern=RUN_NAME_PATTERN)],
    to_step: Annotated[int, Field(ge=1)] | None = None,
    reason: str = "",
) -> Any:
    """Abandon what a run trained beyond a committed step, once somebody has confirmed it.

    The flow run is suspended, its process ends, and Resume in the UI shows the form. If the run was trained on or
    rolled back meanwhile, the answer is void and the flow run fails. Nothing is deleted. Training goes on from that
    step when the train deployment is started again.

    Args:
        storage: Directory under which the run directory lives.
        run_name: The run.
        to_step: A committed step; the run goes on from there. Empty: the newest but one.
        reason: Kept with the run.
    """
    logger = get_run_logger()
    if (permits := permits_of()) is not None:
        permits.check_storage(storage)
    store = run_store(storage, run_name)
    plan = plan_rollback(store, to_step)
    if not plan.abandoned_commits:
        logger.info(plan.summary())
        return {"run": run_name, "step": plan.to_step}
    check_not_held(store)
    question = key_of(plan)
    # After Resume the flow begins anew from here. Prefect then takes the same question for answered.
    asked = asked_before()
    if asked and question not in asked:
        raise RefusedError(
            f"{store.location} has changed since you were asked: it would now be {plan.summary()}. Nothing was done; "
            "start the rollback again to see what it would do now"
        )
    answer = suspend_flow_run(
        wait_for_input=Confirmation.with_initial_data(description=render_question(plan, store.location, reason)),
        key=question,
    )
    assert answer is not None
    if not answer.confirm:
        return Cancelled(message="Not confirmed; nothing was done.")
    record = roll_back(store, plan, f"{reason} {answer.note}", on_wait=logger.info)
    logger.info("rolled back from step %d to step %d; training goes on from there", record.from_step, record.to_step)
    return {"run": run_name, "step": record.to_step}


def key_of(plan: RollbackPlan) -> str:
    """Names the question by all that its answer depends on. Letters, digits and dashes, as Prefect wants keys."""
    newest, target = plan.newest, plan.target
    return f"from-{newest.step}-{newest.incarnation}-to-{target.step}-{target.incarnation}"


def asked_before() -> set[str]:
    """Keys of the questions that this flow run has asked; empty again after a Retry."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.empirical_policy.pause_keys or set()


def render_question(plan: RollbackPlan, location: str, reason: str) -> str:
    rows = [
        ("run directory", f"`{location}`"),
        ("newest committed step", str(plan.from_step)),
        ("back to step", f"**{plan.to_step}** (`{plan.target.path}`)"),
        ("finished steps that are abandoned", str(plan.abandoned_steps)),
        ("checkpoints that are abandoned", ", ".join(f"`{commit.path}`" for commit in plan.abandoned_commits)),
        ("reason", reason.replace("|", "\\|") or "none given"),
    ]
    return "\n".join(
        [
            f"**Roll the run back to step {plan.to_step}?**",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Nothing is deleted. Training goes on from that step when it is started again.",
        ]
    )
