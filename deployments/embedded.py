"""The Prefect API for a run started from a shell without one: a private server that ends with this process."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from trainer.errors import RefusedError, ShoalError
from trainer.processes import tethered

_START_SECONDS = 120.0
_ANSWER_SECONDS = 10.0

# Offline and quiet, whatever the user's Prefect profile says. The run reports for itself on this terminal.
QUIET_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


class EmbeddedServer:
    """A `prefect server` on a free port of loopback, tied to this process: it dies when this process does."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        server = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        options = ["--port", str(self._port), "--no-ui", "--no-scheduler", "--no-late-runs", "--log-level", "ERROR"]
        self._process = subprocess.Popen(
            tethered([*server, *options], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PREFECT_API_URL": self.api_url},
        )

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/api"

    def wait_ready(self) -> None:
        """Raises ShoalError if the server ends or does not answer in time."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ShoalError(
                    f"the embedded Prefect server ended with {self._process.returncode}; "
                    f"try `prefect server start` to see why, or set PREFECT_API_URL"
                )
            try:
                with urllib.request.urlopen(f"{self.api_url}/health", timeout=1.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise ShoalError(f"the embedded Prefect server did not answer within {_START_SECONDS:.0f} s")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ensure_prefect_api() -> EmbeddedServer | None:
    """Make sure that flows find an API: the one of `PREFECT_API_URL`, or an embedded server started now.

    Raises RefusedError if nobody answers at `PREFECT_API_URL`.

    Call before the first import of prefect, which reads its settings then. The server starts in the background;
    `wait_ready` must be called before a flow runs. It is closed when the interpreter exits, after prefect's own exit
    handlers have sent their last logs and events to it: they were registered later, so they run first.
    """
    for name, value in QUIET_SETTINGS.items():
        os.environ.setdefault(name, value)
    if url := os.environ.get("PREFECT_API_URL"):
        _check_answers(url)
        return None
    server = EmbeddedServer()
    atexit.register(server.close)
    os.environ["PREFECT_API_URL"] = server.api_url
    return server


def _check_answers(url: str) -> None:
    """Any answer will do, a refusal included: prefect has credentials for it and this does not."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ANSWER_SECONDS):
            return
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RefusedError(
            f"no Prefect server answers at PREFECT_API_URL={url} ({getattr(reason, 'strerror', None) or reason}): "
            "start it, or unset PREFECT_API_URL to use a private server"
        ) from error
