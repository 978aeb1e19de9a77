"""`shoal serve`: a Prefect server and a runner, kept alive, and ended in an order that loses nothing.

    shoal serve            this process only starts, watches and ends the others
      ├─ prefect server    unless PREFECT_API_URL names one
      ├─ keeper            of the pool, if the service has one; see trainer.control.keeper
      └─ runner            registers and executes; see deployments.runner
           └─ flow run × n    a process each, which outlives the runner

Ending: the runner goes first and by SIGKILL, because Prefect's own way would cancel every flow run. Then each flow
process gets SIGTERM, on which the run stops at a step boundary, saves, and leaves itself to be scheduled again. The
pool follows, and the server goes last, because they report to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployments.serve_config import ServeConfig
from trainer.config import PoolConfig
from trainer.control.runtime import POOL_VARIABLE
from trainer.errors import RefusedError, ShoalError
from trainer.processes import tethered

Say = Callable[[str], None]

SERVICE_VARIABLE = "SHOAL_SERVICE"
"""In the environment of everything that a runner starts: which service it belongs to, also after that was killed and
started again."""
PYTHON = (sys.executable, "-P", "-m")
DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
PREFECT_SETTINGS = {
    # Offline and without telemetry, whatever the user's Prefect profile says.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # A flow run that ends while the server is away must still get its final state. The waits double, from 2 s on: ten
    # of them reach over half an hour.
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    # In memory, a restart of the server would lose who holds a concurrency slot, for good.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # A slot is given back when its flow run leaves Running, and every death is noticed. Given back by the clock too, it
    # would be lost by each flow run that an outage kept from renewing it, and Prefect interrupts those.
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
}
FLOW_SETTINGS = {
    # Prefect starts flow processes with `-m`, which would put a `tasks/` of the user's directory before ours.
    "PYTHONSAFEPATH": "1",
    # They outlive the runner that reads what they say.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "tasks.console.LastingConsoleHandler",
}

_FIRST_BACK_OFF_SECONDS = 1.0
_MOST_BACK_OFF_SECONDS = 30.0
# A program that ran this long did not crash on start: the next back-off begins anew.
_STABLE_SECONDS = 60.0
_SERVER_START_SECONDS = 120.0
_STOP_SECONDS = 20.0


@dataclass
class Supervised:
    """A program that is started again whenever it ends."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    say: Say
    process: asyncio.subprocess.Process | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        back_off = _FIRST_BACK_OFF_SECONDS
        while True:
            began = time.monotonic()
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    # On SIGTERM a runner would cancel every flow run, and a server wait for its clients.
                    *tethered(self.command, signal.SIGKILL),
                    env=dict(self.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self.started.set()
            returncode = await self.process.wait()
            if time.monotonic() - began > _STABLE_SECONDS:
                back_off = _FIRST_BACK_OFF_SECONDS
            self.say(f"{self.name} ended with {returncode} ({self.log}); starting it again in {back_off:.0f} s")
            await asyncio.sleep(back_off)
            back_off = min(2 * back_off, _MOST_BACK_OFF_SECONDS)

    async def stop(self, number: signal.Signals, seconds: float) -> None:
        """Signal it and return once it has ended, by SIGKILL after `seconds`."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(number)
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def check_directory(directory: Path) -> None:
    """Refuse to serve from where Prefect would take somebody else's modules for ours.

    It puts the working directory first on the path when it imports a flow, whatever Python was told.

    Raises:
        RefusedError: naming them.
    """
    ours = Path(__file__).resolve().parent.parent
    shadows = [
        name
        for name in ("flows", "tasks", "trainer", "deployments")
        if directory.resolve() != ours and ((directory / name).is_dir() or (directory / f"{name}.py").is_file())
    ]
    if shadows:
        raise RefusedError(
            f"{directory} has modules named {', '.join(shadows)}, which Prefect would import in place of Shoal's: "
            "start the service in another directory, or rename them"
        )


async def serve(path: Path, config: ServeConfig, say: Say, *, drain_seconds: float) -> None:
    """Run until SIGINT or SIGTERM. `drain_seconds` is how long the flow runs may take to stop and save.

    Raises:
        RefusedError: the port is taken, or nobody answers at PREFECT_API_URL.
        ShoalError: the server does not come up.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = os.environ.get("PREFECT_API_URL")
    own_server = url is None
    api_url = url or f"http://{config.host}:{config.port}/api"
    service = service_id(path)
    with tempfile.TemporaryDirectory(prefix="shoal-serve-") as temporary:
        logs = Path(temporary)
        environment = {**os.environ, **PREFECT_SETTINGS, "PREFECT_API_URL": api_url}
        if config.database_url is not None:
            environment[DATABASE_VARIABLE] = config.database_url
        server = Supervised(
            "the Prefect server",
            [*PYTHON, "prefect", "server", "start", "--host", config.host, "--port", str(config.port)],
            environment,
            logs / "server.log",
            say,
        )
        # The password of the database is the server's business alone: what jobs do is up to their authors.
        of_jobs = {name: value for name, value in environment.items() if name != DATABASE_VARIABLE}
        pool = pool_keeper(path, config.pool, of_jobs, logs, say) if config.pool is not None else None
        # A temporary directory of its own, because nobody cleans up behind a runner that is killed.
        (logs / "tmp").mkdir()
        of_flows = {**FLOW_SETTINGS, "TMPDIR": str(logs / "tmp"), SERVICE_VARIABLE: service}
        runner = Supervised(
            "the runner",
            [*PYTHON, "deployments.runner", str(path)],
            {**of_jobs, **of_flows, **({POOL_VARIABLE: service} if pool is not None else {})},
            logs / "runner.log",
            say,
        )
        kept: list[asyncio.Task[None]] = []
        try:
            if own_server:
                if await asyncio.to_thread(answers, api_url):
                    raise RefusedError(
                        f"something answers at {api_url} already: choose another port, or set PREFECT_API_URL to use it"
                    )
                kept.append(asyncio.create_task(server.keep()))
            if pool is not None:
                kept.append(asyncio.create_task(pool.keep()))
            await wait_answer(api_url, server if own_server else None, stop)
            if stop.is_set():
                return
            kept.append(asyncio.create_task(runner.keep()))
            say(f"UI: {api_url.removesuffix('/api')}  (Ctrl-C stops; what runs is saved, and continued next time)")
            relay = asyncio.create_task(relay_lines(runner.log, say))
            await stop.wait()
            relay.cancel()
            say("stopping: every run stops at a step boundary and saves")
        finally:
            for task in kept:
                task.cancel()
            await asyncio.gather(*kept, return_exceptions=True)
            await runner.stop(signal.SIGKILL, _STOP_SECONDS)
            if runner.started.is_set():  # else they may be those of a service that lives
                await asyncio.to_thread(end_flow_runs, service, say, drain_seconds)
            if pool is not None:
                await pool.stop(signal.SIGTERM, _STOP_SECONDS)
            await server.stop(signal.SIGTERM, _STOP_SECONDS)
    say("stopped")


def pool_keeper(path: Path, config: PoolConfig, environment: Mapping[str, str], logs: Path, say: Say) -> Supervised:
    (logs / "pool.json").write_text(config.model_dump_json())
    command = [*PYTHON, "trainer.control.keeper", service_id(path), str(logs / "pool.json")]
    return Supervised(f"the keeper of pool {service_id(path)}", command, environment, logs / "keeper.log", say)


def service_id(path: Path) -> str:
    """The same each time a service is started from this configuration, and its pool's id as well.

    What a dead one left, hosts and flow processes, is found again.
    """
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


def answers(api_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=2.0):
            return True
    except urllib.error.HTTPError:
        return True  # a refusal is an answer: prefect has credentials for it and this does not
    except (OSError, ValueError):
        return False


async def wait_answer(api_url: str, server: Supervised | None, stop: asyncio.Event) -> None:
    deadline = time.monotonic() + (_SERVER_START_SECONDS if server is not None else 10.0)
    while not stop.is_set() and not await asyncio.to_thread(answers, api_url):
        if time.monotonic() > deadline:
            if server is None:
                raise RefusedError(f"no Prefect server answers at PREFECT_API_URL={api_url}")
            raise ShoalError(f"the Prefect server did not answer at {api_url}: {server.log.read_text()[-2000:]}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await stop.wait()


async def relay_lines(log: Path, say: Say) -> None:
    """What the runner says goes to this terminal as it comes."""
    with log.open(errors="replace") as file:
        while True:
            line = file.readline()
            if line:
                say(line.rstrip())
            else:
                await asyncio.sleep(0.2)


def end_flow_runs(service: str, say: Say, drain_seconds: float) -> None:
    """End every flow process that a runner of this service has ever started, each after it has saved."""
    flow_runs = flow_processes(service)
    for flow_run in flow_runs:
        with contextlib.suppress(psutil.NoSuchProcess):
            flow_run.terminate()
    _, alive = psutil.wait_procs(flow_runs, drain_seconds)
    for flow_run in alive:
        say(f"flow process {flow_run.pid} did not stop within {drain_seconds:.0f} s: killed, steps since a commit lost")
        with contextlib.suppress(psutil.NoSuchProcess):
            flow_run.kill()


def flow_processes(service: str) -> list[psutil.Process]:
    """Those of runners that crashed included: no longer anybody's children, known by what they inherited."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "prefect.engine" in process.cmdline() and process.environ().get(SERVICE_VARIABLE) == service:
                found.append(process)
    return found
