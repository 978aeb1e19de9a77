"""What a person sees while a run trains: the Prefect UI's artifacts and states through its API, and Prometheus."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.multiprocess.harness import PATIENCE_SECONDS, STEPS, Run, assert_complete, wait_until
from trainer.records import CheckpointCommitted, GroupStarting, Recovered, Waiting

NewRun = Callable[..., Run]
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flow_run_of(api: str, run: Run) -> dict[str, Any]:
    """The newest flow run that trains this run, as the API tells it."""
    name = f"train {run.config['run_name']}"
    query = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    (found,) = httpx.post(f"{api}/flow_runs/filter", json=query, timeout=30.0).raise_for_status().json()
    return dict(found)


def artifacts(api: str, run: Run) -> dict[str, str]:
    """Pages by key; each key must have one artifact only, however often it was changed."""
    query = {"flow_runs": {"id": {"any_": [flow_run_of(api, run)["id"]]}}}
    found = httpx.post(f"{api}/artifacts/filter", json=query, timeout=30.0).raise_for_status().json()
    pages = {artifact["key"]: artifact["data"] for artifact in found}
    assert len(pages) == len(found)
    assert {artifact["type"] for artifact in found} <= {"markdown"}
    return pages


def state_names(api: str, run: Run) -> list[str]:
    """Names of all states the flow run has had."""
    query = {"flow_run_id": flow_run_of(api, run)["id"]}
    states = httpx.get(f"{api}/flow_run_states/", params=query, timeout=30.0).raise_for_status().json()
    return [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Values by (sample name, other label than the run's)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"watched"}
    return {
        (sample.name, ",".join(value for name, value in sample.labels.items() if name != "run")): sample.value
        for sample in samples
    }


def test_artifacts_and_metrics_follow_a_run_through_an_incident_to_its_end(new_run: NewRun, prefect_api: str) -> None:
    port = free_port()
    run = new_run(
        env={"SHOAL_TEST_ROW_SECONDS": "0.05"},
        **{"run_name": "watched", "metrics.port": port, "engine.replacement_delay_seconds": -1.0},
    )
    run.start()
    run.wait_step(15)
    before = scrape(port)
    assert before["shoal_step", ""] >= 15
    assert 0 < before["shoal_goodput_ratio", ""] < 1
    assert before["shoal_tokens_per_second", ""] > 0
    assert before["shoal_loss", ""] > 0
    assert (before["shoal_hosts", "ready"], before["shoal_hosts", "lost"]) == (4, 0)
    assert before["shoal_incidents_total", "host_lost"] == 0

    def live_page() -> str | None:
        page = artifacts(prefect_api, run).get("shoal-watched-progress", "")
        return page if "**training**" in page and "tokens/s" in page else None

    live = wait_until(live_page, PATIENCE_SECONDS, run.story)
    print(live)
    assert re.search(rf"\| step \| \d+ of {STEPS} \|", live)
    assert "4 hosts, mesh" in live
    run.wait_event(CheckpointCommitted)
    run.kill_host("host-2")
    recovered = run.wait_event(Recovered)
    run.wait_step(recovered.resumed_from + 2, since=len(run.trained))
    after = scrape(port)
    print(after)
    assert after["shoal_incidents_total", "host_lost"] == 1
    assert after["shoal_resize_seconds_count", "false"] == 1
    assert after["shoal_resize_seconds_sum", "false"] == pytest.approx(recovered.down_seconds)
    assert (after["shoal_hosts", "ready"], after["shoal_hosts", "lost"]) == (3, 1)
    assert after["shoal_committed_step", ""] >= 10
    assert_complete(run, run.wait_end())

    pages = artifacts(prefect_api, run)
    assert set(pages) == {"shoal-watched-progress", "shoal-watched-overview"}
    progress, overview = pages["shoal-watched-progress"], pages["shoal-watched-overview"]
    assert f"| step | {STEPS} of {STEPS} |" in progress
    assert "**complete**" in progress
    assert str(run.directory) in progress
    assert str(run.directory) in overview
    (incident,) = [line for line in overview.splitlines() if "host-2 lost" in line]
    lost = recovered.step - recovered.resumed_from
    assert f"| {recovered.step} | {lost} |" in incident
    assert f"checkpoint {recovered.resumed_from}" in incident
    assert re.search(r"detect \d+, stop \d+, plan \d+", incident)
    assert overview.count("data:image/png;base64,") == 2
    assert f"→ {STEPS} | 3 |" in overview
    print(re.sub(r"base64,[^)]*", lambda found: f"base64,… {len(found[0]):,} characters", overview))
    assert flow_run_of(prefect_api, run)["state_name"] == "Completed"
    assert "WaitingForCapacity" not in state_names(prefect_api, run)


def test_a_run_without_capacity_is_not_called_running(new_run: NewRun, prefect_api: str) -> None:
    run = new_run(run_name="patient")
    run.start()
    run.wait_step(15)
    assert flow_run_of(prefect_api, run)["state_name"] == "Running"
    run.set_capacity(0)
    waiting = run.wait_event(Waiting)

    def waits() -> dict[str, Any] | None:
        state = flow_run_of(prefect_api, run)["state"]
        return state if state["name"] == "WaitingForCapacity" else None

    state = wait_until(waits, PATIENCE_SECONDS, run.story)
    assert state["type"] == "RUNNING"
    assert state["message"] == waiting.reason
    page = artifacts(prefect_api, run)["shoal-patient-progress"]
    assert f"**waiting for capacity**: {waiting.reason}" in page
    assert "tokens/s" not in page
    run.set_capacity(4)
    run.wait_event(GroupStarting, since=run.events.index(waiting))
    wait_until(
        lambda: flow_run_of(prefect_api, run)["state_name"] == "Running",
        PATIENCE_SECONDS,
        lambda: f"{state_names(prefect_api, run)}\n{run.story()}",
    )
    assert_complete(run, run.wait_end())
    names = state_names(prefect_api, run)
    assert names[names.index("WaitingForCapacity") :] == ["WaitingForCapacity", "Running", "Completed"]
    print(names, "run count", flow_run_of(prefect_api, run)["run_count"])
