"""The deployments of prefect.yaml on a process work pool, executed by a real Prefect worker."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.registration import tidy_flow_runs
from tests.multiprocess.harness import Run, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS
from trainer.processes import tethered
from trainer.records import RunEnded

pytestmark = pytest.mark.slow

PREFECT = [str(Path(sys.executable).with_name("prefect"))]
DEPLOYMENTS = Path(__file__).parents[2] / "prefect.yaml"
STEPS = 10


def allowing(text: str, permits: dict[str, Any]) -> str:
    """The file as it is, but for what a user has to write into it."""
    described = yaml.safe_load(text)
    for deployment in described["deployments"]:
        deployment["work_pool"]["job_variables"]["env"]["SHOAL_PERMITS"] = json.dumps(permits)
    return str(yaml.safe_dump(described))


def test_a_prefect_worker_trains_what_a_deployment_of_the_pool_asks_for(
    new_run: Callable[..., Run], environment: dict[str, str], prefect_api: str
) -> None:
    run = new_run(run_name="pooled", steps=STEPS, **{"num_hosts.max": 1})
    permits = {"jobs": ["tiny_job:Mlp"], "storage_roots": [str(run.directory.parent)]}
    (run.cwd / "prefect.yaml").write_text(allowing(DEPLOYMENTS.read_text(), permits))

    def prefect(*arguments: str) -> None:
        finished = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            cwd=run.cwd,
            env={**environment, "PWD": str(run.cwd)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr

    api = httpx.Client(base_url=prefect_api, timeout=30.0)

    def submit(config: dict[str, Any]) -> str:
        deployment = api.get("/deployments/name/train/pool").raise_for_status().json()["id"]
        body = {"parameters": {"config": config}, "state": {"type": "SCHEDULED"}}
        return str(api.post(f"/deployments/{deployment}/create_flow_run", json=body).raise_for_status().json()["id"])

    def wait_state(flow_run: str, name: str) -> dict[str, Any]:
        def state() -> dict[str, Any]:
            return dict(api.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"])

        wait_until(lambda: state()["name"] == name, PATIENCE_SECONDS, lambda: f"{name}: {state()} {log.read_text()}")
        return state()

    prefect("work-pool", "create", "shoal", "--type", "process")
    prefect("deploy", "--all")
    log = run.cwd / "worker.txt"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            tethered([*PREFECT, "worker", "start", "--pool", "shoal"], signal.SIGTERM),
            cwd=run.cwd,
            env={**environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        trains = submit(run.config)
        refused = submit(run.config | {"storage": str(run.cwd / "elsewhere")})
        wait_state(trains, "Completed")
        assert "allow.storage_roots" in wait_state(refused, "Failed")["message"]
    finally:
        worker.terminate()
        worker.wait(PATIENCE_SECONDS)
        api.close()
    run.assert_nothing_left()

    # A service on the same server leaves them to the workers.
    async def tidy() -> list[str]:
        async with get_client() as client:
            return await tidy_flow_runs(client, ["train"])

    with temporary_settings({PREFECT_API_URL: prefect_api}):
        assert asyncio.run(tidy()) == []
    (ended,) = run.of(RunEnded)
    assert (ended.outcome, ended.step) == ("complete", STEPS)
