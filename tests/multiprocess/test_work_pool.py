"""The deployments of prefect.yaml on a process work pool, executed by two real Prefect workers."""

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
import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.registration import tidy_flow_runs
from tests.multiprocess.harness import Run, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS
from trainer.control.lease import read_lease
from trainer.processes import tethered
from trainer.records import RunEnded, RunOpened

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


def test_prefect_workers_train_what_a_deployment_of_the_pool_asks_for(
    new_run: Callable[..., Run], environment: dict[str, str], prefect_api: str
) -> None:
    run, orphan = (new_run(name, run_name=name, steps=STEPS, **{"num_hosts.max": 1}) for name in ("pooled", "orphan"))
    permits = {"jobs": ["tiny_job:Mlp"], "storage_roots": [str(each.directory.parent) for each in (run, orphan)]}
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
    log = run.cwd / "workers.txt"

    def start_worker() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                tethered([*PREFECT, "worker", "start", "--pool", "shoal"], signal.SIGTERM),
                cwd=run.cwd,
                env={**environment, "PREFECT_WORKER_QUERY_SECONDS": "1", "SHOAL_TEST_ROW_SECONDS": "0.1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    workers = [start_worker(), start_worker()]
    try:
        trains = submit(run.config)
        refused = submit(run.config | {"storage": str(run.cwd / "elsewhere")})
        wait_state(trains, "Completed")
        assert "allow.storage_roots" in wait_state(refused, "Failed")["message"]

        # A worker is killed: its flow process goes on, and the other worker does not double it.
        orphaned = submit(orphan.config)
        orphan.wait_step(2)
        lease = read_lease(orphan.store)
        assert lease is not None
        trainer = psutil.Process(lease.process.pid)
        (worker,) = (each for each in workers if each.pid in {parent.pid for parent in trainer.parents()})
        worker.kill()
        wait_state(orphaned, "Completed")
        psutil.wait_procs([trainer], PATIENCE_SECONDS)
    finally:
        for each in workers:
            each.terminate()
            each.wait(PATIENCE_SECONDS)
        api.close()
    for each in (run, orphan):
        each.assert_nothing_left()
        assert len(each.of(RunOpened)) == 1
        (ended,) = each.of(RunEnded)
        assert (ended.outcome, ended.step) == ("complete", STEPS)

    # A service on the same server leaves them to the workers.
    async def tidy() -> list[str]:
        async with get_client() as client:
            return await tidy_flow_runs(client, ["train"])

    with temporary_settings({PREFECT_API_URL: prefect_api}):
        assert asyncio.run(tidy()) == []
