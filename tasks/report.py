"""The report task: what a person reads when the run has ended, or at any time before."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from trainer.report import build_report
from trainer.store import Store


@task(name="publish-report", task_run_name="publish report", cache_policy=NO_CACHE, persist_result=False)
def publish_report(store: Store) -> str | None:
    """Write `report/` and return where it lies; None if no step is finished yet."""
    return build_report(store)
