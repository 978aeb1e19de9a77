"""One real Prefect server for all runs of this folder, and the undisturbed run that the others are compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Run, assert_complete, down_times, wait_until
from tests.multiprocess.service import Service
from trainer.processes import tethered

START_SECONDS = 120.0


def clean_environment(prefect_home: Path) -> dict[str, str]:
    """This process's, without what the developer's shell says to Prefect and JAX."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "JAX_", "XLA_", "SHOAL_"))
    }
    return environment | {
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # Compiling is most of a start here, and what is compiled is the same.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Prefect server that ends with this process, however it ends."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    options = ["--no-ui", "--no-scheduler", "--no-late-runs", "--log-level", "ERROR"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            tethered([*command, *options], signal.SIGTERM),
            env={**clean_environment(home), "PREFECT_API_URL": url},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:

        def healthy() -> bool:
            assert process.poll() is None, (home / "server.log").read_text()
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{url}/health", timeout=1.0).close()
                return True
            return False

        wait_until(healthy, START_SECONDS, lambda: f"the Prefect server answers: {(home / 'server.log').read_text()}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> dict[str, str]:
    """For runs that use the shared server. Each row takes 8 ms to load, so a step at least 32 ms on 4 hosts."""
    home = tmp_path_factory.mktemp("prefect-client")
    return clean_environment(home) | {"PREFECT_API_URL": prefect_api, "SHOAL_TEST_ROW_SECONDS": "0.008"}


@pytest.fixture
def new_run(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """Makes runs with changes to the base configuration; whatever they leave is ended after the test."""
    made: list[Run] = []

    def new(name: str = "one", *, env: dict[str, str] | None = None, **changes: Any) -> Run:
        run = Run(tmp_path / name, {**environment, **(env or {})}, **changes)
        made.append(run)
        return run

    yield new
    for run in made:
        run.clean_up()
        print(down_times(run))


@pytest.fixture
def new_service(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Service]]:
    """Makes services that offer runs, each with a server of its own; their processes are ended after the test."""
    made: list[Service] = []

    def new(runs: dict[str, Run], **settings: Any) -> Service:
        home = {"PREFECT_HOME": str(tmp_path / "prefect-home")}
        service = Service(tmp_path / f"service-{len(made)}", {**environment, **home}, runs, **settings)
        made.append(service)
        return service

    yield new
    for service in made:
        service.clean_up()


@pytest.fixture
def embedded_environment(tmp_path: Path) -> dict[str, str]:
    """For runs that bring their own Prefect server."""
    return clean_environment(tmp_path / "prefect-home") | {"SHOAL_TEST_ROW_SECONDS": "0.008"}


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Run:
    """The undisturbed run of the base configuration: four hosts from the first step to the last."""
    run = Run(tmp_path_factory.mktemp("reference"), {**environment, "SHOAL_TEST_ROW_SECONDS": "0"})
    try:
        run.start()
        assert_complete(run, run.wait_end())
    finally:
        run.clean_up()
    return run
