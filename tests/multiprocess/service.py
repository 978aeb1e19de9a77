"""`shoal serve` as a real process, and Prefect's REST API to talk to it as the UI does."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import uuid
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.multiprocess.harness import SHOAL, Run, wait_until

PATIENCE_SECONDS = 180.0
_MARK = "SHOAL_TEST_SERVICE"


class Service:
    """Offers the run of a harness `Run` as `train/<name>` beside `train/train`."""

    def __init__(self, directory: Path, environment: dict[str, str], runs: dict[str, Run], **settings: Any) -> None:
        directory.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.environment = {**environment, _MARK: self.mark}
        self.environment.pop("PREFECT_API_URL", None)
        self.path = directory / "serve.yaml"
        schedules = settings.pop("schedules", {})
        self.path.write_text(
            yaml.safe_dump(
                {
                    "port": self.port,
                    "poll_seconds": 1,
                    "allow": {
                        "jobs": ["tiny_job:Mlp"],
                        "storage_roots": [str(run.directory.parent) for run in runs.values()],
                    },
                    "runs": [
                        {"name": name, "config": str(run.config_path), **schedules.get(name, {})}
                        for name, run in runs.items()
                    ],
                    **settings,
                }
            )
        )
        self.process: subprocess.Popen[bytes] | None = None
        self._outputs = 0
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api", timeout=30.0)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, cwd: Path, **environment: str) -> None:
        """Returns once it serves."""
        self._outputs += 1
        with self.output_path.open("wb") as file:
            self.process = subprocess.Popen(
                [*SHOAL, "serve", str(self.path)],
                cwd=cwd,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        wait_until(self._is_serving, PATIENCE_SECONDS, lambda: f"it serves: {self.output}")

    def _is_serving(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.output
        assert "the runner ended with 1" not in self.output, self.output
        return "serving train/train" in self.output

    def stop(self) -> int:
        """SIGTERM, as a service manager would. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    @property
    def output_path(self) -> Path:
        return self.directory / f"output-{self._outputs}.txt"

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes of this service whose command line holds all these words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(_MARK) == self.mark and all(
                    any(word in part for part in process.cmdline()) for word in words
                ):
                    found.append(process)
        return found

    def flow_process(self) -> psutil.Process | None:
        """The only one there is, if any."""
        found = self.flow_processes()
        assert len(found) <= 1, [process.cmdline() for process in found]
        return found[0] if found else None

    def flow_processes(self, flow_run_id: str | None = None) -> list[psutil.Process]:
        """All, or those that execute this flow run."""
        found = self.processes("prefect.engine")
        if flow_run_id is None:
            return found
        return [process for process in found if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run_id]

    def clean_up(self) -> None:
        self.api.close()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait()

    # --- talking to Prefect ------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, json: Any = None) -> Any:
        # SQLite serves one writer at a time: a busy server answers 503, and every client of Prefect's tries again.
        answer = wait_until(
            lambda: None if (got := self.api.request(method, path, json=json)).status_code == 503 else got,
            PATIENCE_SECONDS,
            lambda: f"{method} {path}",
        )
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def submit(self, deployment: str, parameters: dict[str, Any] | None = None) -> str:
        """What the UI's "Run" button does. Returns the id of the flow run."""
        found = self.call("GET", f"/deployments/name/train/{deployment}")
        body = {"parameters": parameters or found["parameters"], "state": {"type": "SCHEDULED"}}
        return str(self.call("POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/flow_runs/{flow_run_id}"))

    def state_names(self, flow_run_id: str) -> list[str]:
        states = self.call("GET", f"/flow_run_states/?flow_run_id={flow_run_id}")
        return [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]

    def wait_state(self, flow_run_id: str, name: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            with contextlib.suppress(httpx.TransportError):
                run = self.flow_run(flow_run_id)
                return run if run["state"]["name"] == name else None
            return None

        return wait_until(
            reached,
            PATIENCE_SECONDS,
            lambda: f"{name}: {self.state_names(flow_run_id)}; {self.flow_run(flow_run_id)['state']}; {self.output}",
        )

    def set_state(self, flow_run_id: str, type_: str, name: str) -> None:
        self.call("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": {"type": type_, "name": name}})
