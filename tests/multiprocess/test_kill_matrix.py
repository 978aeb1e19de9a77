"""Flow process, service and server die at any moment: never two trainers of a run, always completion."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import psutil
import pytest

from deployments.attending import MOST_FALSE_STARTS
from deployments.serve import service_id
from tests.multiprocess.harness import STEPS, Run, assert_same_training, describe, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer.control.lease import read_lease
from trainer.control.remote import RemotePool
from trainer.control.runtime import ControllerFile, runtime_root
from trainer.errors import RefusedError
from trainer.processes import is_alive
from trainer.records import (
    CheckpointCommitted,
    GroupStarting,
    RunEnded,
    RunOpened,
    SegmentEnded,
    Waiting,
    WorkerPhase,
)

pytestmark = pytest.mark.soak

POOL = {
    "hosts": 2,
    "engine": {"devices_per_host": 2, "replacement_delay_seconds": 1.0},
    "keeper_timeout_seconds": 180.0,
}
# As `sitecustomize` it comes before everything else that a Python process does.
KILLED_AT_BIRTH = """
import os, sys
if "prefect.engine" in sys.orig_argv and os.path.exists({killer!r}):
    os.kill(os.getpid(), 9)
"""
_SAMPLE_SECONDS = 0.05


class Witness:
    """Looks many times a second who commands the runs and the hosts of a service, from the outside."""

    def __init__(self) -> None:
        self.looks = 0
        self.doubled: list[str] = []
        self._pool = ""
        self._runs: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def watch(self, service: Service, *runs: Run) -> None:
        self._pool = service_id(service.path)
        self._runs = {run.store.location for run in runs}
        self._thread.start()

    def assert_never_two(self) -> None:
        self._closing.set()
        self._thread.join()
        assert self.looks > 100
        assert self.doubled == []

    def _watch(self) -> None:
        while not self._closing.wait(_SAMPLE_SECONDS):
            self._look()
            self.looks += 1

    def _look(self) -> None:
        controllers = Counter(controller.run for controller in living_controllers() if controller.run in self._runs)
        self.doubled += [f"{count} controllers of {run}" for run, count in controllers.items() if count > 1]
        with contextlib.suppress(RefusedError):  # no keeper at the moment
            view = RemotePool.find(self._pool).view()
            tenancies = Counter(tenancy.run for tenancy in view.tenancies)
            self.doubled += [f"{count} tenancies of {run}" for run, count in tenancies.items() if count > 1]
            hosts = Counter(host for tenancy in view.tenancies for host in tenancy.hosts)
            self.doubled += [f"{host} in {count} tenancies" for host, count in hosts.items() if count > 1]


def living_controllers() -> list[ControllerFile]:
    found = []
    for path in runtime_root().glob("controllers/*.json"):
        with contextlib.suppress(FileNotFoundError):
            controller = ControllerFile.model_validate_json(path.read_bytes())
            if is_alive(controller.process):
                found.append(controller)
    return found


@pytest.fixture
def witness() -> Iterator[Witness]:
    witness = Witness()
    yield witness
    witness.assert_never_two()


def pool_of(service: Service) -> RemotePool:
    """Once its keeper is there."""

    def found() -> RemotePool | None:
        with contextlib.suppress(RefusedError):
            return RemotePool.find(service_id(service.path))
        return None

    return wait_until(found, PATIENCE_SECONDS, lambda: f"a keeper: {service.output}")


def trainer_process(run: Run) -> psutil.Process:
    """The one that holds the lease of the run."""
    lease = read_lease(run.store)
    assert lease is not None
    assert lease.holder is not None, run.story()
    return psutil.Process(lease.process.pid)


def assert_one_writer_at_a_time(run: Run) -> None:
    """Each controller wrote its part of the journal before the next one began, and none wrote of another's group."""
    run.look()
    events = sorted(run.events, key=lambda event: event.time)
    writers = [writer for writer, _ in groupby(event.controller for event in events)]
    assert len(writers) == len(set(writers)), run.story()
    starts = run.of(GroupStarting)
    assert all(earlier.incarnation < later.incarnation for earlier, later in pairwise(starts)), run.story()
    owners = {start.incarnation: start.controller for start in starts}
    for commit in run.of(CheckpointCommitted):
        assert owners[commit.incarnation] == commit.controller, run.story()


def assert_complete(run: Run) -> None:
    (*_, ended) = run.of(RunEnded)
    assert (ended.outcome, ended.step) == ("complete", STEPS), run.story()
    report = (run.directory / "report" / "report.md").read_text()
    assert f"The run is **complete** after **{STEPS} steps**" in report
    assert_one_writer_at_a_time(run)


def new_small_run(new_run: Callable[..., Run], name: str, **changes: object) -> Run:
    return new_run(name, run_name=name, **{"num_hosts.max": 2, **changes})


def test_a_flow_process_killed_in_any_phase_is_continued(
    new_run: Callable[..., Run],
    new_service: Callable[..., Service],
    reference: Run,
    witness: Witness,
    tmp_path: Path,
) -> None:
    run, looping = new_small_run(new_run, "one"), new_small_run(new_run, "looping", **{"elastic.max_failures": 1})
    service = new_service({"one": run, "looping": looping}, pool=POOL, look_at_pool_seconds=3600)
    killer = tmp_path / "kill"
    (tmp_path / "sitecustomize.py").write_text(KILLED_AT_BIRTH.format(killer=str(killer)))
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.02", PYTHONPATH=str(tmp_path))
    witness.watch(service, run, looping)
    pool = pool_of(service)
    seen = 0

    def kill_at(phase: str) -> None:
        nonlocal seen
        trainer_process(run).kill()
        run.look()
        print(f"killed: {phase}, after {type(run.events[-1]).__name__}")
        seen = len(run.events)

    # Observe: it looks for hosts, and there are none.
    pool.offer(0)
    flow_run = service.submit("one")
    run.wait_event(Waiting, timeout=PATIENCE_SECONDS)
    kill_at("observe")
    pool.offer(2)
    # Plan, and resize: three deaths without a commit are what it may have.
    run.wait_event(RunOpened, since=seen, timeout=PATIENCE_SECONDS)
    kill_at("plan")
    run.wait_event(WorkerPhase, lambda event: event.phase == "devices", since=seen, timeout=PATIENCE_SECONDS)
    kill_at("resize")
    # Segment: between two checkpoints.
    committed = run.wait_event(CheckpointCommitted, since=seen, timeout=PATIENCE_SECONDS)
    run.wait_step(committed.step + 3, timeout=PATIENCE_SECONDS)
    kill_at("segment")
    # A later resize, on the way back from a lost host.
    run.wait_event(CheckpointCommitted, since=seen, timeout=PATIENCE_SECONDS)
    run.kill_host("host-1")
    seen = len(run.events)
    run.wait_event(GroupStarting, since=seen, timeout=PATIENCE_SECONDS)
    kill_at("resize after a loss")
    # Publish: the last step is committed, the report is not written, Prefect was told nothing.
    run.wait_event(RunEnded, since=seen, timeout=PATIENCE_SECONDS)
    lease = read_lease(run.store)  # it may have given the lease back by now
    assert lease is not None
    psutil.Process(lease.process.pid).kill()
    print(f"report at its death: {(run.directory / 'report' / 'report.md').exists()}")
    service.wait_state(flow_run, "Completed")
    states = Counter(service.state_names(flow_run))
    print(states)
    assert states["Crashed"] == 6
    assert_complete(run)
    assert_same_training(run, reference)

    # A crash loop: it dies each time before it begins.
    killer.touch()
    flow_run = service.submit("looping")
    failed = service.wait_state(flow_run, "Failed")
    assert re.search(r"died \d+ times in a row before the flow began", failed["state"]["message"])
    assert MOST_FALSE_STARTS < service.state_names(flow_run).count("Crashed") <= 3 * MOST_FALSE_STARTS
    assert not looping.directory.exists()
    killer.unlink()

    # Another one: it begins, and dies each time before it commits anything.
    service.set_state(flow_run, "SCHEDULED", "AwaitingRetry")
    seen = 0
    for _ in range(2):
        looping.wait_event(RunOpened, since=seen, timeout=PATIENCE_SECONDS)
        trainer_process(looping).kill()
        seen = len(looping.events)
    failed = service.wait_state(flow_run, "Failed")
    assert "died 2 times in a row without a newly committed step" in failed["state"]["message"]
    assert looping.of(RunEnded)[-1].outcome == "failed"
    assert len(looping.of(RunOpened)) == 2
    wait_until(lambda: not service.flow_processes(), PATIENCE_SECONDS, lambda: describe(service.flow_processes()))
    assert service.state_names(flow_run)[-2:] == ["Running", "Failed"]
    assert pool.view().tenancies == ()

    assert service.stop() == 0
    assert service.processes() == []
    run.assert_nothing_left()


def test_service_and_server_may_die_while_a_run_trains(
    new_run: Callable[..., Run],
    new_service: Callable[..., Service],
    reference: Run,
    witness: Witness,
    tmp_path: Path,
) -> None:
    run, left, other = (new_small_run(new_run, name) for name in ("one", "left", "other"))
    service = new_service({"one": run, "left": left, "other": other}, pool=POOL, look_at_pool_seconds=3600)
    pause = tmp_path / "pause"
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.02", SHOAL_TEST_PAUSE=str(pause))
    witness.watch(service, run, left, other)
    flow_run = service.submit("one")

    # The service dies, and with it server, runner and keeper. The flow process and its hosts live on.
    committed = run.wait_event(CheckpointCommitted, timeout=PATIENCE_SECONDS)
    trainer = trainer_process(run)
    kill_service(service)
    run.wait_event(SegmentEnded, lambda event: event.end_step > committed.step, timeout=PATIENCE_SECONDS)
    pause.touch()  # a start of the service may take longer than the rest of the run
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.02", SHOAL_TEST_PAUSE=str(pause))
    assert trainer_process(run) == trainer
    assert service.flow_run(flow_run)["state"]["name"] == "Running"

    # Somebody takes it for dead all the same: a second process comes, and does not train.
    service.set_state(flow_run, "SCHEDULED", "AwaitingRetry")
    wait_until(
        lambda: len(service.flow_processes(flow_run)) == 2, PATIENCE_SECONDS, lambda: f"a second one {service.output}"
    )
    wait_until(lambda: len(service.flow_processes(flow_run)) == 1, PATIENCE_SECONDS, lambda: "one of them ends")
    print(service.state_names(flow_run), trainer_process(run).is_running())

    # The server dies at the end of a segment, and once more at the end of the flow.
    segments = len(run.of(SegmentEnded))
    pause.unlink()
    wait_until(lambda: len(run.of(SegmentEnded)) > segments, PATIENCE_SECONDS, lambda: "a segment ends")
    kill_server(service)
    run.wait_event(RunEnded, timeout=PATIENCE_SECONDS)
    kill_server(service)
    service.wait_state(flow_run, "Completed")
    wait_until(lambda: not service.flow_processes(), PATIENCE_SECONDS, lambda: describe(service.flow_processes()))
    print(service.state_names(flow_run))
    assert len(run.of(RunOpened)) == 1
    assert_complete(run)
    assert_same_training(run, reference, abandoned=0)

    # A service that took over from a dead one ends what that one had started, too.
    flow_run = service.submit("left")
    left.wait_event(CheckpointCommitted, timeout=PATIENCE_SECONDS)
    pause.touch()
    kill_service(service)
    service.start(run.cwd)
    pause.unlink()
    assert service.stop() == 0
    assert service.processes() == [], describe(service.processes())
    assert left.of(RunEnded)[-1].outcome == "stopped", left.story()

    # The next one continues it. Its machine restarts: everything dies at once, and no event tells of it.
    service.start(run.cwd, SHOAL_TEST_PAUSE=str(pause))
    seen = len(left.events)
    left.wait_event(RunOpened, since=seen, timeout=PATIENCE_SECONDS)
    trainer = trainer_process(left)
    kill_service(service)
    trainer.kill()
    for agent in service.processes("trainer.control.host_agent"):
        agent.kill()
    wait_until(lambda: not service.processes(), PATIENCE_SECONDS, lambda: describe(service.processes()))

    # Meanwhile two people start another run at the same moment.
    service.start(run.cwd)
    both = [service.submit("train", {"config": other.config}) for _ in range(2)]
    service.wait_state(flow_run, "Completed")
    assert_complete(left)
    assert_same_training(left, reference, abandoned=0)

    def over() -> bool:
        return all(service.flow_run(each)["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED") for each in both)

    wait_until(over, PATIENCE_SECONDS, lambda: f"{[service.state_names(each) for each in both]}")
    print([(service.state_names(each), service.flow_run(each)["state"]["message"]) for each in both])
    assert_complete(other)
    assert_same_training(other, reference, abandoned=0)
    assert len(other.of(RunOpened)) == 1
    assert service.stop() == 0
    assert service.processes() == []


def kill_service(service: Service) -> None:
    assert service.process is not None
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()


def kill_server(service: Service) -> None:
    """Once there is one: it may be just coming back from the last time."""
    (server,) = wait_until(
        lambda: service.processes("prefect", "server", "start"), PATIENCE_SECONDS, lambda: "there is a server"
    )
    server.kill()
