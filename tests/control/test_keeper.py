"""A real keeper with real host agents: whose a host is, and what becomes of it when the run or the keeper goes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from trainer import wire
from trainer.config import PoolConfig, parse_config
from trainer.control.hosts import PoolHost
from trainer.control.remote import RemotePool
from trainer.control.runtime import agent_files, living_keepers, runtime_root
from trainer.control.tenancy import Tenancy
from trainer.errors import LeaseError, RefusedError, ShoalError
from trainer.planning.topology import MemoryEstimate, MeshShape, TopologyPlan
from trainer.processes import is_alive
from trainer.records import RestoredFrom

DEADLINE_SECONDS = 30.0


class KeptPool:
    """A keeper in a process of its own."""

    def __init__(self, directory: Path, pool_id: str) -> None:
        self.id = pool_id
        self._path = directory / f"{pool_id}.json"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: Any) -> RemotePool:
        pool = self.start_without_waiting(**settings)
        self.wait(lambda: len(pool.view().free) == pool.view().offered)
        return pool

    def start_without_waiting(self, **settings: Any) -> RemotePool:
        config = {"hosts": 3, "contact_timeout_seconds": 2.0, "engine": {"replacement_delay_seconds": 0.2}} | settings
        self._path.write_text(PoolConfig.model_validate(config).model_dump_json())
        self.process = subprocess.Popen([sys.executable, "-P", "-m", "trainer.control.keeper", self.id, self._path])
        self.wait(lambda: self.id in {keeper.pool for keeper in living_keepers(runtime_root())})
        return self.remote()

    def remote(self) -> RemotePool:
        return RemotePool.find(self.id)

    def agents(self) -> list[int]:
        """Process numbers of the living agents of this pool."""
        return [
            agent.process.pid
            for _, agent in agent_files(runtime_root())
            if agent.controller == self.id and is_alive(agent.process)
        ]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            assert self.process is not None
            assert self.process.poll() is None
            time.sleep(0.02)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(DEADLINE_SECONDS) == 0
        assert self.agents() == []
        assert not (runtime_root() / "pools" / self.id).exists()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[KeptPool]:
    """A pool for one test, not started yet."""
    own = KeptPool(tmp_path, f"own{os.getpid()}")
    yield own
    if own.process is not None and own.process.poll() is None:
        own.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptPool]:
    started = KeptPool(tmp_path_factory.mktemp("pool"), f"kept{os.getpid()}")
    started.start()
    yield started
    started.stop()


@pytest.fixture
def kept(started: KeptPool) -> Iterator[KeptPool]:
    """A pool with three free hosts, shared by the tests that leave it so."""
    yield started
    started.wait(lambda: started.remote().view().free == ("host-0", "host-1", "host-2"))


class Tenant:
    """What a controller does with its hosts, without a run."""

    def __init__(self, pool: str, name: str, run: str, *, max_hosts: int = 3, devices_per_host: int = 2) -> None:
        values = {"num_hosts": {"max": max_hosts}, "engine": {"devices_per_host": devices_per_host}}
        config = parse_config({"run_name": "r", "steps": 1, **values})
        self.states: list[tuple[str, str]] = []
        self.over: list[ShoalError] = []
        self._changed = asyncio.Event()
        self.tenancy = Tenancy(
            config,
            pool=pool,
            run=run,
            controller=name,
            root=runtime_root(),
            on_change=self._note,
            on_over=self._end,
        )

    def _note(self, host: PoolHost, _: str) -> None:
        self.states.append((host.host_id, host.state))
        self._changed.set()

    def _end(self, error: ShoalError) -> None:
        self.over.append(error)
        self._changed.set()

    @property
    def usable(self) -> set[str]:
        return {host.host_id for host in self.tenancy.capacity().hosts}

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_usable(self, *numbers: int) -> None:
        await self.wait(lambda: self.usable == {f"host-{number}" for number in numbers})


@contextlib.asynccontextmanager
async def tenant(pool: str, name: str, run: str, **settings: int) -> AsyncIterator[Tenant]:
    made = Tenant(pool, name, run, **settings)
    await made.tenancy.open()
    try:
        yield made
    finally:
        await made.tenancy.close()


async def start_worker(tenant: Tenant, host_id: str) -> int:
    """A real worker that waits for a coordinator for ever. Returns its process number."""
    topology = TopologyPlan(
        hosts=("host-0", "host-1"),
        devices_per_host=2,
        hosts_per_slice=1,
        mesh=MeshShape(dcn_data=2, dcn_fsdp=1, ici_fsdp=2, ici_tensor=1),
        global_batch_size=4,
        num_microbatches=1,
        rows_per_microbatch=4,
        remat="none",
        memory=MemoryEstimate(
            params_bytes=0, optimizer_bytes=0, gradients_bytes=0, activations_bytes=0, limit_bytes=None
        ),
        step_seconds_guess=1.0,
    )
    link = tenant.tenancy.link(host_id)
    assert link is not None
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    link.listen(lambda _, message: started.set_result(message.pid) if isinstance(message, wire.WorkerStarted) else None)
    link.send(
        wire.StartWorker(
            incarnation=1,
            assignment=wire.Assignment(
                incarnation=1,
                config=parse_config({"run_name": "r", "steps": 1}),
                topology=topology,
                host_id=host_id,
                process_index=1,
                run_directory="",
                restore=RestoredFrom(tier="init", step=0),
                restore_path=None,
            ),
            environment=tenant.tenancy.worker_environment(host_id),
        )
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await started


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(4 * DEADLINE_SECONDS):
            await scene()

    asyncio.run(bounded())


def test_hosts_go_to_one_run_after_the_other_and_no_worker_of_the_first_is_left(kept: KeptPool) -> None:
    pool = kept.remote()

    async def scene() -> None:
        async with tenant(kept.id, "c1", "/runs/one") as first:
            await first.wait_usable(0, 1, 2)
            worker = await start_worker(first, "host-1")
            async with tenant(kept.id, "c2", "/runs/two") as second:
                assert second.usable == set()
                assert {host.tenancy for host in (await asyncio.to_thread(pool.view)).hosts} == {"c1"}
                await first.tenancy.close()
                await second.wait_usable(0, 1, 2)
                assert not psutil.pid_exists(worker)
                assert [agent for agent in kept.agents() if not psutil.pid_exists(agent)] == []
                assert [each.run for each in (await asyncio.to_thread(pool.view)).tenancies] == ["/runs/two"]

    run(scene)


def test_a_new_controller_of_a_run_takes_over_from_the_old_one(kept: KeptPool) -> None:

    async def scene() -> None:
        async with tenant(kept.id, "c1", "/runs/one") as old:
            await old.wait_usable(0, 1, 2)
            worker = await start_worker(old, "host-0")
            async with tenant(kept.id, "c2", "/runs/one") as new:
                await new.wait_usable(0, 1, 2)
                assert not psutil.pid_exists(worker)
                await old.wait(lambda: bool(old.over))
                assert isinstance(old.over[0], LeaseError)
                assert old.usable == set()

    run(scene)


def test_a_lost_host_comes_back_into_its_tenancy(kept: KeptPool) -> None:
    pool = kept.remote()

    async def scene() -> None:
        async with tenant(kept.id, "c1", "/runs/one") as first, tenant(kept.id, "c2", "/runs/two") as second:
            await first.wait_usable(0, 1, 2)
            groups = {host.host_id: host.process_group for host in (await asyncio.to_thread(pool.view)).hosts}
            group = groups["host-1"]
            assert group is not None
            os.killpg(group, signal.SIGKILL)
            await first.wait_usable(0, 2)
            await first.wait_usable(0, 1, 2)
            # Frozen, it neither answers nor ends; the tenant misses it and the keeper replaces it.
            group = groups["host-2"]
            assert group is not None
            os.killpg(group, signal.SIGSTOP)
            await first.wait_usable(0, 1)
            await first.wait_usable(0, 1, 2)
            assert not psutil.pid_exists(group)
            assert second.states == []

    run(scene)


def test_hosts_leave_when_the_run_lets_them_go_and_come_back_only_when_given(kept: KeptPool) -> None:
    pool = kept.remote()

    async def scene() -> None:
        async with tenant(kept.id, "c1", "/runs/one") as first:
            await first.wait_usable(0, 1, 2)
            pool_process = {host.host_id: host.pid for host in (await asyncio.to_thread(pool.view)).hosts}
            await asyncio.to_thread(pool.offer, 2)
            await first.wait_usable(0, 1)
            assert pool_process["host-2"] in kept.agents(), "it is alive until the run lets it go"
            first.tenancy.release_leaving(frozenset())
            await first.wait(lambda: first.states[-1] == ("host-2", "withdrawn"))

            view = await asyncio.to_thread(pool.offer, 3)
            while "host-2" not in view.free:
                view = await asyncio.to_thread(pool.newer, view.version)
            assert first.usable == {"host-0", "host-1"}
            order = wire.Enlarge(key="k", tenancy="c1", hosts=("host-2",))
            await asyncio.to_thread(pool.enlarge, order)
            await first.wait_usable(0, 1, 2)
            told = len(first.states)
            await asyncio.to_thread(pool.enlarge, order)  # asked twice, given once
            with pytest.raises(RefusedError, match="used for another order"):
                await asyncio.to_thread(pool.enlarge, order.model_copy(update={"hosts": ("host-0",)}))
            with pytest.raises(RefusedError, match="host-2 not free"):
                await asyncio.to_thread(pool.enlarge, order.model_copy(update={"key": "other"}))
            with pytest.raises(RefusedError, match="tenancy gone is over"):
                await asyncio.to_thread(pool.enlarge, order.model_copy(update={"key": "x", "tenancy": "gone"}))
            with pytest.raises(RefusedError, match="never has more than 3"):
                await asyncio.to_thread(pool.offer, 4)
            assert len(first.states) == told

            # Offered again before the run has let it go, it stays.
            await asyncio.to_thread(pool.offer, 2)
            await first.wait_usable(0, 1)
            await asyncio.to_thread(pool.offer, 3)
            await first.wait_usable(0, 1, 2)

    run(scene)


def test_a_run_for_other_hosts_is_refused(kept: KeptPool) -> None:

    async def scene() -> None:
        async with tenant(kept.id, "c1", "/runs/one", devices_per_host=4) as refused:
            assert "engine.devices_per_host is 4, the pool's 2" in str(refused.over[0])
            assert refused.usable == set()

    run(scene)


def tenant_with_a_worker(pool: str, worker: multiprocessing.Queue[int]) -> None:
    """For a process of its own: holds all hosts and a worker until it is killed."""

    async def scene() -> None:
        async with tenant(pool, "c1", "/runs/one") as each:
            await each.wait_usable(0, 1, 2)
            worker.put(await start_worker(each, "host-0"))
            await asyncio.Event().wait()

    asyncio.run(scene())


def test_a_frozen_controller_loses_its_workers_and_then_its_hosts(kept: KeptPool) -> None:
    pool = kept.remote()
    agents = sorted(kept.agents())
    context = multiprocessing.get_context("spawn")
    started = context.Queue()
    process = context.Process(target=tenant_with_a_worker, args=(kept.id, started))
    process.start()
    try:
        worker = started.get(timeout=DEADLINE_SECONDS)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        kept.wait(lambda: not psutil.pid_exists(worker))
        kept.wait(lambda: pool.view().free == ("host-0", "host-1", "host-2"))
        assert pool.view().tenancies == ()
        assert sorted(kept.agents()) == agents
    finally:
        process.kill()
        process.join()


def test_no_host_is_ever_in_two_tenancies(kept: KeptPool) -> None:
    """Six runs come and go at random; each notes what it may use, and when."""
    held: dict[str, str] = {}
    random = Random(7)

    async def come_and_go(name: str) -> None:
        for turn in range(6):
            async with tenant(kept.id, f"{name}-{turn}", f"/runs/{name}", max_hosts=random.choice([1, 2, 3])) as each:
                mine: set[str] = set()

                def note(each: Tenant = each, mine: set[str] = mine) -> bool:
                    for host_id in each.usable - mine:
                        assert held.setdefault(host_id, name) == name, f"{host_id} is {held[host_id]}'s"
                        mine.add(host_id)
                    return bool(mine)

                await each.wait(note)
                await asyncio.sleep(random.random() * 0.05)
                note()
                for host_id in mine:
                    del held[host_id]

    async def scene() -> None:
        await asyncio.gather(*(come_and_go(f"run{number}") for number in range(6)))

    run(scene)


def test_a_killed_keeper_takes_nothing_with_it_and_the_next_one_goes_on(own: KeptPool) -> None:
    pool = own.start()

    async def scene() -> None:
        async with (
            tenant(own.id, "c1", "/runs/one", max_hosts=2) as first,
            tenant(own.id, "c2", "/runs/two", max_hosts=1) as second,
        ):
            await first.wait_usable(0, 1)
            await second.wait_usable(2)
            agents, worker = sorted(own.agents()), await start_worker(first, "host-1")
            assert own.process is not None
            own.process.kill()
            own.process.wait()
            await second.tenancy.close()  # while there is no keeper
            told = len(first.states)
            again = await asyncio.to_thread(own.start_without_waiting)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while (view := await asyncio.to_thread(again.view)).free != ("host-2",):
                    await asyncio.to_thread(again.newer, view.version)
            assert sorted(own.agents()) == agents
            assert first.usable == {"host-0", "host-1"}
            assert first.states[told:] == []
            assert psutil.pid_exists(worker)
            # It commands them as the first one did.
            os.kill(agents[0], signal.SIGKILL)
            await first.wait(lambda: len(first.usable) < 2 or len(again.view().free) == 0)
            await first.wait_usable(0, 1)

    run(scene)
    with pytest.raises(RefusedError, match="does not answer"):
        pool.view()
    own.stop()


def test_a_pool_follows_a_trace_and_is_then_not_set_by_hand(own: KeptPool, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "".join(f"0,add,n{number}\n" for number in range(5)) + "2000,remove,n0\n2000,remove,n1\n2000,remove,n2\n"
    )
    pool = own.start_without_waiting(capacity={"provider": "trace", "trace_path": str(trace)})
    seen: set[int] = set()
    own.wait(lambda: seen.add(view := pool.view().offered) or view == 2)  # type: ignore[func-returns-value]
    assert seen <= {0, 2, 3}, "never more than the pool has"
    assert pool.view().source == "trace"
    with pytest.raises(RefusedError, match="follows a trace"):
        pool.offer(1)


def test_only_the_holder_of_the_token_may_ask(kept: KeptPool) -> None:
    (keeper,) = [keeper for keeper in living_keepers(runtime_root()) if keeper.pool == kept.id]
    assert (runtime_root() / "keepers" / f"{kept.id}.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RefusedError, match="wrong or missing token"):
        RemotePool(keeper.url, "wrong").view()
