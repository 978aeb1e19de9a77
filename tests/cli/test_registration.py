"""What a service puts into Prefect, as far as it can be seen without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prefect.client.schemas.objects import ConcurrencyLimitStrategy

from deployments.registration import alerts, automations, deployments
from deployments.serve_config import AlertsConfig, ServeConfig
from trainer.config import RunConfig

RUN = {"run_name": "r", "steps": 5, "storage": "runs"}


def made(**schedule: Any) -> Any:
    config = ServeConfig.model_validate(
        {
            "allow": {"storage_roots": ["runs"]},
            "runs": [{"name": "one", "config": "run.yaml", "schedule": schedule or None}],
        }
    )
    everything, *_, one = asyncio.run(deployments([(config.runs[0], RunConfig.model_validate(RUN))]))
    return everything, one


def test_the_form_shows_every_setting_with_its_description() -> None:
    everything, _ = made()
    # A path entry point would put flows/ itself on the module path.
    assert everything.entrypoint == "flows.train.train_run"
    schema = everything._parameter_openapi_schema
    run_config = schema.definitions["RunConfig"]["properties"]
    assert set(run_config) == set(RunConfig.model_fields)
    text = json.dumps(schema.definitions)
    for model, field in (
        ("RunConfig", "steps"),
        ("ElasticConfig", "max_failures"),
        ("CheckpointConfig", "keep_last_n"),
    ):
        assert schema.definitions[model]["properties"][field]["description"] in text
        assert len(schema.definitions[model]["properties"][field]["description"]) > 10


def test_the_forms_of_all_flows_are_served_under_names_that_no_run_can_take() -> None:
    config = ServeConfig.model_validate(
        {"allow": {"storage_roots": ["runs"]}, "runs": [{"name": "rollback", "config": "run.yaml"}]}
    )
    served = asyncio.run(deployments([(config.runs[0], RunConfig.model_validate(RUN))]))
    assert [(deployment.full_name, deployment.entrypoint) for deployment in served] == [
        ("train/train", "flows.train.train_run"),
        ("rollback/rollback", "flows.rollback.rollback"),
        ("evaluate/evaluate", "flows.evaluate.evaluate"),
        ("train/rollback", "flows.train.train_run"),
    ]
    for deployment in served[1:3]:
        properties = deployment._parameter_openapi_schema.properties
        assert all(len(each["description"]) > 5 for each in properties.values())
        assert properties["run_name"]["pattern"], "a run name must not lead out of the storage"


def test_only_what_knows_when_to_stop_is_continued_after_a_crash() -> None:
    """A rollback asks again, and an evaluation that the machine's memory cannot hold would be tried for ever."""
    served = asyncio.run(deployments([]))
    _, crashed = automations(ServeConfig.model_validate({"allow": {"storage_roots": ["runs"]}}))
    tag = crashed.trigger.match_related.model_dump()["prefect.resource.id"].removeprefix("prefect.tag.")
    assert [deployment.full_name for deployment in served if tag in deployment.tags] == ["train/train"]


@pytest.mark.parametrize(
    ("if_running", "strategy"),
    [("skip", ConcurrencyLimitStrategy.CANCEL_NEW), ("queue", ConcurrencyLimitStrategy.ENQUEUE)],
)
def test_a_schedule_never_doubles_a_run_and_keeps_its_time_zone(
    if_running: str, strategy: ConcurrencyLimitStrategy
) -> None:
    _, one = made(cron="0 2 * * *", timezone="Europe/Berlin", if_running=if_running, own_run_each_time=True)
    (schedule,) = one.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert (one.concurrency_limit, one.concurrency_options.collision_strategy) == (1, strategy)
    assert one.parameters["own_run_each_time"] is True
    assert one.parameters["config"]["run_name"] == "r"


def test_an_interval_keeps_its_grid_over_a_restart() -> None:
    _, one = made(interval_seconds=3600, timezone="UTC")
    _, again = made(interval_seconds=3600, timezone="UTC")
    assert one.schedules[0].schedule.anchor_date == again.schedules[0].schedule.anchor_date


def test_what_crashed_is_continued_unless_that_is_switched_off() -> None:
    allow = {"storage_roots": ["runs"]}
    continued = automations(ServeConfig.model_validate({"allow": allow}))
    left_alone = automations(ServeConfig.model_validate({"allow": allow, "continue_crashed": False}))
    assert [automation.name for automation in left_alone] == ["shoal: no sign of life"]
    assert {automation.name for automation in continued} == {"shoal: no sign of life", "shoal: continue what crashed"}


def test_a_run_that_waits_is_not_taken_for_dead() -> None:
    config = ServeConfig.model_validate({"allow": {"storage_roots": ["runs"]}, "lost_after_seconds": 150})
    silent, crashed = automations(config)
    waiting = {f"prefect.flow-run.{name}" for name in ("Suspended", "Paused", "AwaitingRetry", "Scheduled")}
    assert waiting <= silent.trigger.expect
    assert silent.trigger.within.total_seconds() == 150
    # Neither may touch flow runs that are not Shoal's.
    for automation in (silent, crashed):
        assert "prefect.tag.shoal" in json.dumps(automation.trigger.match_related.model_dump())


def test_each_alert_can_be_switched_off() -> None:
    assert len(alerts(AlertsConfig(), None)) == 5
    off = {"incidents_per_hour": None, "goodput_below": None, "no_progress_seconds": None, "waiting_seconds": None}
    assert alerts(AlertsConfig.model_validate(off | {"failed_actions": False}), None) == []


def test_a_low_goodput_is_every_percentage_below_the_bound() -> None:
    (low,) = [alert for alert in alerts(AlertsConfig(goodput_below=0.29), None) if "goodput" in alert.name]
    assert low.trigger.match.model_dump()["shoal.goodput-percent"] == [str(percent) for percent in range(29)]
