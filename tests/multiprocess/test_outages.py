"""The Prefect server goes away under a service: training does not notice, and every state is right in the end."""

from __future__ import annotations

import contextlib
import datetime
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.serve import PREFECT_SETTINGS
from tests.multiprocess.harness import SAVE_INTERVAL, STEPS, Run, assert_complete, assert_same_training, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer.history import RunHistory
from trainer.processes import tethered
from trainer.records import CheckpointCommitted, Recovered, RunEnded, RunOpened, SegmentEnded
from trainer.store import LocalStore

SHORT_STEPS = 12
INTERVAL = datetime.timedelta(seconds=10)  # the shortest there is
HOLD_DATABASE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60.0)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""
# The flow as Prefect's engine runs it for a deployment with a concurrency limit. SIGUSR1 does what the loss of the slot
# does there.
TRAIN_WITH_A_SLOT = """
import signal, sys, threading
from pathlib import Path
from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope
from flows.train import train_run
from trainer.config import load_config

with WatcherThreadCancelScope() as scope:
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=scope.cancel).start())
    train_run(load_config(Path(sys.argv[1])))
"""


class Hanging:
    """The service's own server takes connections and answers nothing."""

    starts_outlive_it = True

    def __init__(self, service: Service, prefect_home: Path) -> None:
        self._service = service
        self.service_environment: dict[str, str] = {}

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        (server,) = self._service.processes("prefect", "server", "start")
        server.suspend()
        try:
            yield
        finally:
            server.resume()

    def close(self) -> None:
        """The server is the service's."""


class Locked(Hanging):
    """Another process holds the server's database: it answers 503 to what would write, after some seconds each."""

    def __init__(self, service: Service, prefect_home: Path) -> None:
        super().__init__(service, prefect_home)
        self._database = prefect_home / "prefect.db"

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        command = [sys.executable, "-c", HOLD_DATABASE, str(self._database)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            try:
                assert holder.stdout.readline() == b"locked\n"
                yield
            finally:
                holder.kill()


class Refusing:
    """A server that is not the service's own is killed, and started again later."""

    # Prefect's client tries again only where it was connected before: a process that is just starting ends. Its Crashed
    # is lost on the automations if it comes in the first seconds of the new server.
    starts_outlive_it = False

    def __init__(self, service: Service, prefect_home: Path) -> None:
        self._service = service
        self._home = prefect_home
        self.service_environment = {"PREFECT_API_URL": f"http://127.0.0.1:{service.port}/api"}
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        environment = {**self._service.environment, **PREFECT_SETTINGS, **self.service_environment}
        with (self._service.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                tethered([*command, "--port", str(self._service.port)], signal.SIGKILL),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, PATIENCE_SECONDS, lambda: f"the server answers: {self._process.poll()}")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._service.api.get("/health").is_success
        return False

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [
        pytest.param(30.0, Hanging, marks=pytest.mark.slow),
        pytest.param(30.0, Refusing, marks=pytest.mark.soak),
        pytest.param(30.0, Locked, marks=pytest.mark.soak),
        pytest.param(300.0, Hanging, marks=pytest.mark.soak),
        pytest.param(300.0, Refusing, marks=pytest.mark.soak),
        pytest.param(1200.0, Hanging, marks=pytest.mark.soak),
        pytest.param(1200.0, Refusing, marks=pytest.mark.soak),
    ],
)
def test_training_goes_on_without_a_server_and_every_state_is_right_in_the_end(
    seconds: float,
    kind: type[Hanging | Refusing],
    new_run: Callable[..., Run],
    new_service: Callable[..., Service],
    reference: Run,
    tmp_path: Path,
) -> None:
    # One run is there before and after and loses a host meanwhile, one ends, and one may have just been started.
    short = {"num_hosts.max": 1, "steps": SHORT_STEPS, "optimizer.decay_steps": STEPS}
    short |= {"checkpoint.save_interval_steps": 5}
    through = new_run("through", run_name="through", **{"num_hosts.max": 2})
    ending = new_run("ending", run_name="ending", **short)
    starting = new_run("starting", run_name="starting", **short)
    runs = {"through": through, "ending": ending, "starting": starting}
    service = new_service(runs)
    patience = 2 * PATIENCE_SECONDS + 2 * seconds
    with contextlib.closing(kind(service, tmp_path / "prefect-home")) as server:
        # 16 rows a step, on two hosts at the same time: 60 steps outlast the outage, 12 on one host do not.
        service.start(through.cwd, SHOAL_TEST_ROW_SECONDS=str(seconds / 370), **server.service_environment)
        flow_runs = {name: service.submit(name) for name in ("through", "ending")}
        through.wait_step(2, timeout=patience)
        ending.wait_step(1, timeout=patience)
        if kind.starts_outlive_it:
            flow_runs["starting"] = service.submit("starting")
            wait_until(lambda: service.flow_processes(flow_runs["starting"]), PATIENCE_SECONDS, lambda: service.output)

        with server.outage():
            began = time.monotonic()
            through.look()
            seen = len(through.events)
            through.kill_host("host-1")
            recovered = through.wait_event(Recovered, lambda event: not event.planned, since=seen, timeout=patience)
            seen = through.events.index(recovered)
            through.wait_event(SegmentEnded, since=seen, timeout=patience)
            through.wait_event(CheckpointCommitted, since=seen, timeout=patience)
            ended = ending.wait_event(RunEnded, timeout=patience)
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            assert not through.of(RunEnded), "it outlasts the outage"

        for name, flow_run in flow_runs.items():
            runs[name].wait_event(RunEnded, timeout=patience)
            service.wait_state(flow_run, "Completed")
        assert ended.outcome == "complete"
        assert_same_training(through, reference)
        for run in [runs[name] for name in flow_runs if name != "through"]:
            assert_same_training(run, reference, steps=SHORT_STEPS, abandoned=0)
        for run in [runs[name] for name in flow_runs]:
            assert len(run.of(RunOpened)) == 1, "another process trained"
        # What Prefect may have missed is in the journal: every segment, one after the other.
        ends = [event.end_step for event in through.of(SegmentEnded)]
        assert ends == sorted(ends)
        assert ends[-1] == STEPS
        assert service.stop() == 0
        for run in runs.values():
            run.assert_nothing_left()


@pytest.mark.slow
def test_a_flow_run_that_is_taken_for_dead_while_it_trains_goes_on_undisturbed(
    new_run: Callable[..., Run], new_service: Callable[..., Service], reference: Run
) -> None:
    run = new_run(**{"num_hosts.max": 1})
    service = new_service({"one": run})
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.12")
    flow_run = service.submit("one")
    run.wait_step(1, timeout=PATIENCE_SECONDS)
    # As the automation for want of signs of life does. The process that trains sets it right.
    service.set_state(flow_run, "CRASHED", "Crashed")
    service.wait_state(flow_run, "Running")

    # Before it has, another runner or a worker may start a second process.
    service.set_state(flow_run, "CRASHED", "Crashed")
    execute = [sys.executable, "-P", "-m", "prefect", "flow-run", "execute", flow_run]
    environment = {**service.environment, "PREFECT_API_URL": f"http://127.0.0.1:{service.port}/api"}
    subprocess.run(execute, cwd=run.cwd, env=environment, timeout=PATIENCE_SECONDS, check=False)
    assert not run.of(RunEnded), "it outlasts the other's coming and going"
    service.wait_state(flow_run, "Running")
    service.wait_state(flow_run, "Completed")
    assert "Failed" not in service.state_names(flow_run)
    assert len(run.of(RunOpened)) == 1
    assert_same_training(run, reference, abandoned=0)
    assert service.stop() == 0


@pytest.mark.slow
def test_a_flow_run_that_lost_its_concurrency_slot_is_not_interrupted(
    new_run: Callable[..., Run], reference: Run
) -> None:
    run = new_run(env={"SHOAL_TEST_ROW_SECONDS": "0.03"})
    run.start(program=(sys.executable, "-P", "-c", TRAIN_WITH_A_SLOT))
    run.wait_step(SAVE_INTERVAL + 5)
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR1)
    code = run.wait_end()
    assert "Prefect no longer counts this flow run" in run.output
    assert_complete(run, code)
    assert_same_training(run, reference, abandoned=0)
    assert len({event.incarnation for event in run.of(SegmentEnded)}) == 1, "its group trained on"


@pytest.mark.slow
def test_of_many_starts_missed_while_the_service_was_down_one_is_made_up_for(
    new_run: Callable[..., Run], new_service: Callable[..., Service]
) -> None:
    run = new_run(steps=10, **{"num_hosts.max": 1})
    # Queued, because skipping alone would hide a storm.
    schedule = {
        "interval_seconds": INTERVAL.total_seconds(),
        "timezone": "UTC",
        "own_run_each_time": True,
        "if_running": "queue",
    }
    service = new_service({"often": run}, schedules={"often": {"schedule": schedule}})
    service.start(run.cwd)
    wait_until(
        lambda: any(due_at(flow_run) - now() > 15 * INTERVAL for flow_run in scheduled(service)),
        PATIENCE_SECONDS,
        lambda: "Prefect has planned ahead",
    )
    assert service.stop() == 0
    stopped = now()
    wait_until(lambda: now() - stopped > 11 * INTERVAL, PATIENCE_SECONDS, lambda: "ten starts are missed")
    started = now()
    service.start(run.cwd)

    def missed() -> list[str]:
        found = [flow_run for flow_run in scheduled(service) if stopped < due_at(flow_run) < started]
        return [flow_run["state"]["name"] for flow_run in found]

    assert len(missed()) >= 10
    wait_until(
        lambda: missed().count("Cancelled") >= len(missed()) - 1,
        PATIENCE_SECONDS,
        lambda: f"all but one are called off: {missed()} {service.output}",
    )
    assert service.stop() == 0


@pytest.mark.soak
def test_a_cron_of_sixty_seconds_over_a_run_of_ninety_neither_doubles_nor_piles_up(
    new_run: Callable[..., Run], new_service: Callable[..., Service]
) -> None:
    run = new_run(steps=9, **{"num_hosts.max": 1})
    schedule = {"cron": "* * * * *", "timezone": "UTC", "own_run_each_time": True}
    service = new_service({"often": run}, schedules={"often": {"schedule": schedule}})
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.55")  # nine steps of 16 rows: 80 s beside the start
    over = time.monotonic() + 600.0
    while time.monotonic() < over:
        service.flow_process()  # fails if there is more than one
        time.sleep(0.5)
    skipped = [flow_run for flow_run in scheduled(service) if flow_run["state"]["name"] == "Cancelled"]
    assert service.stop() == 0
    histories = [
        RunHistory.load(LocalStore(directory))
        for directory in sorted(run.directory.parent.iterdir())
        if re.fullmatch(r"run-\d{8}T\d{6}Z", directory.name)
    ]
    complete = [history for history in histories if history.state == "complete"]
    assert len(complete) >= 3
    assert len(skipped) >= 3
    spans = [(history.events[0].time, history.events[-1].time) for history in histories if history.events]
    assert all(first[1] <= second[0] for first, second in pairwise(spans)), spans


def scheduled(service: Service) -> list[dict[str, Any]]:
    """The flow runs that a schedule has made."""
    found = service.call("POST", "/flow_runs/filter", {"limit": 200})
    return [flow_run for flow_run in found if flow_run["auto_scheduled"]]


def due_at(flow_run: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(flow_run["expected_start_time"])


def now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
