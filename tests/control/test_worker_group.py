"""From signs to one verdict: a real group over links whose agents these tests play."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from trainer import wire
from trainer.config import RunConfig, parse_config
from trainer.control.agent_link import AgentLink
from trainer.control.engines.protocol import PlacedHost
from trainer.control.worker_group import GroupListener, Verdict, WorkerGroup
from trainer.planning.topology import MemoryEstimate, MeshShape, TopologyPlan
from trainer.records import MetricsRecord, RestoredFrom

HOSTS = ("host-0", "host-1", "host-2")


class PlayedLink(AgentLink):
    """An agent played by the test: what the group sends is kept, what the worker does is a verb."""

    def __init__(self, host_id: str) -> None:
        super().__init__(
            PlacedHost(host_id=host_id, url="", token="", pid=0, process_group=0),
            None,  # type: ignore[arg-type]  # no socket: `send` and the verbs below replace both directions
        )
        self.sent: list[wire.Message] = []
        self.obeys_kill = True

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)
        if isinstance(message, wire.KillWorkers) and self.obeys_kill:
            asyncio.get_running_loop().call_soon(self.exit_worker, -signal.SIGKILL)
        if isinstance(message, wire.ToWorker) and isinstance(message.message, wire.Exit) and self.obeys_kill:
            asyncio.get_running_loop().call_soon(self.exit_worker, 0)

    def say(self, message: wire.FromWorkerMessage, incarnation: int = 1) -> None:
        self._receive(wire.FromWorker(incarnation=incarnation, message=message))

    def exit_worker(self, returncode: int, output: str = "", incarnation: int = 1) -> None:
        self._receive(wire.WorkerExited(incarnation=incarnation, pid=7, returncode=returncode, output_tail=output))

    def fail_worker(self, kind: str, error: str = "boom") -> None:
        failure = {"kind": kind, "phase": "step", "error": error, "traceback": f"trace of {error}"}
        self.say(wire.Failed.model_validate(failure))

    def lose(self) -> None:
        self.lost.set()

    def orders(self) -> list[wire.ToWorkerMessage]:
        return [message.message for message in self.sent if isinstance(message, wire.ToWorker)]


def metrics(step: int) -> MetricsRecord:
    return MetricsRecord(
        step=step, loss=1.0, learning_rate=0.1, samples=3, tokens=3, sample_digest="0" * 16, step_seconds=0.1
    )


def config(**elastic: Any) -> RunConfig:
    return parse_config({"run_name": "group", "steps": 10, "global_batch_size": 3, "elastic": elastic})


class Played:
    """A group of three with everything it told its controller."""

    def __init__(self, run_config: RunConfig) -> None:
        self.links = {host_id: PlayedLink(host_id) for host_id in HOSTS}
        self.heard: list[Any] = []
        self.group = WorkerGroup(
            incarnation=1,
            config=run_config,
            topology=TopologyPlan(
                hosts=HOSTS,
                devices_per_host=1,
                hosts_per_slice=1,
                mesh=MeshShape(dcn_data=3, dcn_fsdp=1, ici_fsdp=1, ici_tensor=1),
                global_batch_size=3,
                num_microbatches=1,
                rows_per_microbatch=3,
                remat="none",
                memory=MemoryEstimate(
                    params_bytes=0, optimizer_bytes=0, gradients_bytes=0, activations_bytes=0, limit_bytes=None
                ),
                step_seconds_guess=1.0,
            ),
            links=self.links,
            environment=lambda _: {},
            run_directory="/nowhere",
            restored_from=RestoredFrom(tier="init", step=0),
            restore_path=None,
            listener=GroupListener(
                on_phase=lambda *args: self.heard.append(args),
                on_steps=self.heard.append,
                on_saving=self.heard.append,
                on_saved=self.heard.append,
                on_save_failed=self.heard.append,
            ),
        )

    async def start(self) -> None:
        starting = asyncio.create_task(self.group.start(until_step=5))
        await asyncio.sleep(0)
        for link in self.links.values():
            link.say(wire.Phase(phase="rendezvous", seconds=0.1))
        await asyncio.sleep(0)
        for link in self.links.values():
            link.say(wire.Ready(step=0))
        await starting

    async def verdict(self) -> Verdict:
        async with asyncio.timeout(10):
            return await self.group.verdict


def play(
    scene: Callable[[Played], Coroutine[Any, Any, None]], run_config: RunConfig | None = None, *, started: bool = True
) -> None:
    async def run() -> None:
        played = Played(run_config or config())
        if started:
            await played.start()
        try:
            await scene(played)
        finally:
            played.group.close()

    asyncio.run(run())


def test_others_learn_the_coordinator_only_once_process_0_listens() -> None:
    async def scene(played: Played) -> None:
        starting = asyncio.create_task(played.group.start(until_step=5))
        await asyncio.sleep(0)
        assert all(link.orders() == [] for link in played.links.values())
        played.links["host-0"].say(wire.CoordinatorListening(address="127.0.0.1:1234"))
        told = [
            host_id
            for host_id, link in played.links.items()
            if wire.Coordinator(address="127.0.0.1:1234") in link.orders()
        ]
        assert told == ["host-1", "host-2"]
        starting.cancel()

    play(scene, started=False)


def test_no_step_is_granted_before_the_last_worker_is_ready() -> None:
    async def scene(played: Played) -> None:
        starting = asyncio.create_task(played.group.start(until_step=5))
        await asyncio.sleep(0)
        for link in played.links.values():
            assert not any(isinstance(order, wire.Grant) for other in played.links.values() for order in other.orders())
            link.say(wire.Phase(phase="rendezvous", seconds=0.1))
        await asyncio.sleep(0)
        for link in played.links.values():
            assert not any(isinstance(order, wire.Grant) for other in played.links.values() for order in other.orders())
            link.say(wire.Ready(step=0))
        await starting
        assert all(wire.Grant(until_step=5) in link.orders() for link in played.links.values())

    play(scene, started=False)


def test_the_group_is_ready_when_every_worker_is() -> None:
    async def scene(played: Played) -> None:
        assert not played.group.ended
        played.links["host-0"].say(wire.Steps(metrics=(metrics(1), metrics(2))))
        await played.group.wait_step(2)
        assert played.group.step == 2

    play(scene)


def test_a_lost_host_is_the_cause_and_the_echoes_of_the_others_are_not() -> None:
    async def scene(played: Played) -> None:
        played.links["host-1"].fail_worker("peer", "gloo: connection closed by peer")
        played.links["host-0"].exit_worker(-signal.SIGABRT)
        await asyncio.sleep(0.05)
        played.links["host-2"].lose()
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids, verdict.alive) == ("host_lost", ("host-2",), 2)

    play(scene)


def test_hosts_lost_together_are_one_incident() -> None:
    async def scene(played: Played) -> None:
        played.links["host-0"].lose()
        await asyncio.sleep(0.01)
        played.links["host-2"].lose()
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids, verdict.alive) == ("host_lost", ("host-0", "host-2"), 1)

    play(scene)


def test_a_killed_worker_is_found_among_the_echoes_of_its_peers() -> None:
    async def scene(played: Played) -> None:
        played.links["host-0"].exit_worker(-signal.SIGABRT, "coordination service: peer gone")
        played.links["host-2"].fail_worker("peer")
        played.links["host-1"].exit_worker(-signal.SIGKILL)
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids) == ("worker_crashed", ("host-1",))
        assert "SIGKILL" in verdict.message

    play(scene)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("user", "user_error"),
        ("data", "data_error"),
        ("memory", "out_of_memory"),
        ("storage", "checkpoint_error"),
        ("system", "worker_crashed"),
    ],
)
def test_the_failing_workers_own_record_is_the_one_shown(kind: str, cause: str) -> None:
    async def scene(played: Played) -> None:
        played.links["host-0"].fail_worker("peer", "echo")
        played.links["host-2"].fail_worker(kind, "the real one")
        played.links["host-2"].exit_worker(1)
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids, verdict.details) == (cause, ("host-2",), "trace of the real one")

    play(scene)


def test_echoes_without_a_cause_become_a_crash_after_a_while() -> None:
    async def scene(played: Played) -> None:
        played.links["host-1"].fail_worker("peer", "gloo timed out")
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids) == ("worker_crashed", ("host-1",))

    play(scene)


def test_a_group_that_stays_silent_is_found_at_the_deadline_of_its_phase() -> None:
    async def silent_start(played: Played) -> None:
        starting = asyncio.create_task(played.group.start(until_step=5))
        await asyncio.sleep(0)
        played.links["host-0"].say(wire.Phase(phase="rendezvous", seconds=0.1))
        await starting
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids) == ("worker_stuck", ("host-1", "host-2"))

    async def silent_steps(played: Played) -> None:
        await played.group.wait_step(1)
        assert (await played.verdict()).cause == "worker_stuck"

    async def silent_stop(played: Played) -> None:
        played.group.request_stop()
        played.links["host-0"].say(wire.Stopped(step=3))
        await played.group.wait_ended(0.1)
        verdict = await played.verdict()
        assert (verdict.cause, verdict.host_ids) == ("worker_stuck", ("host-1", "host-2"))

    play(silent_start, config(start_timeout_seconds=0.1), started=False)
    play(silent_steps, config(step_timeout_seconds=0.1))
    play(silent_stop)


def test_a_group_stops_when_all_have_stopped_and_process_0_leaves_last() -> None:
    async def scene(played: Played) -> None:
        played.group.request_stop()
        for link in played.links.values():
            assert not played.group.ended
            link.say(wire.Stopped(step=4))
        assert played.group.stopped.result() == 4
        order: list[str] = []
        for host_id, link in played.links.items():
            played_exit = link.exit_worker

            def exit_worker(code: int, *, host_id: str = host_id, leave: Any = played_exit) -> None:
                order.append(host_id)
                leave(code)

            link.exit_worker = exit_worker  # type: ignore[method-assign]  # to see the order
        assert await played.group.dismiss() == []
        assert order[2] == "host-0"

    play(scene)


def test_what_another_incarnation_says_is_dropped() -> None:
    async def scene(played: Played) -> None:
        link = played.links["host-0"]
        link.say(wire.Steps(metrics=(metrics(9),)), incarnation=7)
        link.exit_worker(-signal.SIGKILL, incarnation=7)
        await asyncio.sleep(0.1)
        assert played.group.step == 0
        assert not played.group.ended

    play(scene)


def test_a_closed_group_hears_nothing_more() -> None:
    async def scene(played: Played) -> None:
        played.group.close()
        played.links["host-0"].say(wire.Steps(metrics=(metrics(1),)))
        assert played.group.step == 0

    play(scene)


def test_a_host_that_does_not_obey_the_kill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.control.worker_group._KILL_SECONDS", 0.1)

    async def scene(played: Played) -> None:
        played.links["host-1"].obeys_kill = False
        assert await played.group.kill() == ["host-1"]

    play(scene)
