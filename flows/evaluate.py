"""The evaluate flow: the loss of a checkpoint on held-out samples, as an artifact."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from tasks.watching import artifact_key
from trainer.config import RUN_NAME_PATTERN
from trainer.control.evaluate import evaluate_run, evaluated_run
from trainer.evaluation import Evaluation
from trainer.permits import permits_of
from trainer.store import run_store


@flow(name="evaluate", flow_run_name="evaluate {run_name}", retries=0, persist_result=False, validate_parameters=True)
def evaluate(
    storage: str,
    run_name: Annotated[str, Field(pattern=RUN_NAME_PATTERN)],
    step: Annotated[int, Field(ge=1)] | None = None,
    batches: Annotated[int, Field(ge=1)] = 16,
    data_path: str | None = None,
) -> Any:
    """Compute the loss of a checkpoint, on the CPU. Reads only, so that it can be done while the run trains.

    The result is the artifact `shoal-<run>-evaluation`; each evaluation is a version of it.

    Args:
        storage: Directory under which the run directory lives.
        run_name: The run.
        step: A committed step. Empty: the newest good one.
        batches: How many, of the run's global_batch_size samples each.
        data_path: Other data. Empty: the run's own, from beyond its last step.
    """
    permits = permits_of()
    if permits is not None:
        permits.check_storage(storage)
    store = run_store(storage, run_name)
    if permits is not None:
        # What evaluates is the run's own job, and run.json may name any.
        _, config = evaluated_run(store, data_path)
        permits.check(config)
    evaluation = evaluate_run(store, step=step, batches=batches, data_path=data_path)
    get_run_logger().info(evaluation.line)
    create_markdown_artifact(
        key=artifact_key(run_name, "evaluation"),
        markdown=render_evaluation(evaluation, store.location),
        description=evaluation.line,
    )
    return evaluation.model_dump(mode="json")


def render_evaluation(evaluation: Evaluation, location: str) -> str:
    rows = [("step", str(evaluation.step)), ("loss", f"**{evaluation.loss:.4f}**")]
    if evaluation.perplexity is not None:
        rows.append(("perplexity", f"{evaluation.perplexity:.3f}"))
    rows += [
        ("samples", f"{evaluation.samples:,} {evaluation.kind_of_samples}"),
        ("tokens", f"{evaluation.tokens:,}"),
        ("checkpoint", f"`{location}/{evaluation.checkpoint}`"),
        ("data", evaluation.data.replace("|", "\\|")),
    ]
    return "\n".join(
        [
            f"### {evaluation.run_name}: evaluation of step {evaluation.step}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
        ]
    )
