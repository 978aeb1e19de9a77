"""A controller's side of a tenancy: the hosts of a pool that outlives runs, as long as they are this run's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import aiohttp

from trainer import wire
from trainer.config import RunConfig
from trainer.control.agent_link import AgentLink
from trainer.control.engines.protocol import PlacedHost
from trainer.control.hosts import HostTable, PoolHost
from trainer.control.runtime import KeeperFile, living_keepers
from trainer.errors import LeaseError, RefusedError, ShoalError

_RETRY_SECONDS = 0.5
_FIRST_ANSWER_SECONDS = 10.0


class Tenancy(HostTable):
    """Hosts let to this controller by the keeper of `pool`.

    A keeper that is away for a while changes nothing for the hosts that are here already; it is looked for until the
    tenancy is closed. `on_over` is told when the pool lets nothing to this controller any more.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        pool: str,
        run: str,
        controller: str,
        root: Path,
        on_change: Callable[[PoolHost, str], None],
        on_over: Callable[[ShoalError], None],
    ) -> None:
        super().__init__(config.engine, on_change)
        self._order = wire.Acquire(
            tenancy=controller,
            run=run,
            min_hosts=config.num_hosts.min,
            max_hosts=config.num_hosts.max,
            engine=config.engine,
        )
        self._pool = pool
        self._root = root
        self._on_over = on_over
        self._outbox: asyncio.Queue[wire.Message] = asyncio.Queue()
        self._session: aiohttp.ClientSession | None = None
        self._talking: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._environments: dict[str, dict[str, str]] = {}

    @property
    def offered(self) -> int:
        """How many hosts are this run's, usable or not."""
        return sum(host.state not in ("leaving", "withdrawn") for host in self.hosts.values())

    async def open(self) -> None:
        """Return once the keeper has answered, or after a while without it: capacity can be waited for."""
        self._session = aiohttp.ClientSession()
        self._talking = asyncio.create_task(self._talk(self._session))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ANSWER_SECONDS):
                await self._answered.wait()

    def offer(self, num_hosts: int) -> None:
        """Raises RefusedError: how many hosts there are is not this run's to say."""
        raise RefusedError(
            f"this run's hosts are those of a pool: `shoal pool --hosts {num_hosts}` changes how many it has"
        )

    def worker_environment(self, host_id: str) -> dict[str, str]:
        """Variables that make a worker on this host see the host's devices."""
        return self._environments[host_id]

    def release_leaving(self, in_use: frozenset[str]) -> None:
        """Give back leaving hosts that no worker group uses."""
        for host in self.hosts.values():
            if host.state == "leaving" and host.host_id not in in_use and not host.released.is_set():
                host.released.set()
                self._outbox.put_nowait(wire.Release(host_id=host.host_id))

    async def expel(self, host_id: str) -> None:
        """Have a host ended that does not obey; it is replaced like a lost one."""
        placed = self.hosts[host_id].placed
        if placed is not None:
            self._outbox.put_nowait(wire.Expel(host_id=host_id, pid=placed.pid))

    async def close(self) -> None:
        """Give all hosts back; the keeper sees to it that nothing of this run is left on them."""
        tasks = [host.task for host in self.hosts.values() if host.task is not None]
        if self._talking is not None:
            tasks.append(self._talking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- the keeper --------------------------------------------------------------------------------------------------

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        over = False
        while not over:
            keeper = self._find_keeper()
            if keeper is not None:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                    over = await self._converse(session, keeper)
            if not over:
                await asyncio.sleep(_RETRY_SECONDS)

    def _find_keeper(self) -> KeeperFile | None:
        return next((keeper for keeper in living_keepers(self._root) if keeper.pool == self._pool), None)

    async def _converse(self, session: aiohttp.ClientSession, keeper: KeeperFile) -> bool:
        """Until the connection ends. Returns whether the tenancy is over."""
        async with session.ws_connect(
            f"{keeper.url}/tenancy",
            headers={"Authorization": f"Bearer {keeper.token}"},
            heartbeat=2 * _FIRST_ANSWER_SECONDS,
        ) as socket:
            await socket.send_str(wire.encode(self._order))
            sender = asyncio.create_task(self._send_all(socket))
            try:
                async for frame in socket:
                    if frame.type is aiohttp.WSMsgType.TEXT and self._hear(wire.FROM_KEEPER.validate_json(frame.data)):
                        return True
            finally:
                sender.cancel()
        return False

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await socket.send_str(wire.encode(await self._outbox.get()))

    def _hear(self, message: wire.FromKeeperMessage) -> bool:
        """Returns whether the tenancy is over."""
        match message:
            case wire.Acquired():
                for host in list(self.hosts.values()):
                    if host.host_id not in message.hosts and host.state != "withdrawn":
                        self._withdraw(host, "it is no longer this run's")
                self._answered.set()
            case wire.HostUpdate():
                self._update(self.hosts.setdefault(message.host_id, PoolHost(message.host_id)), message)
            case wire.Refused():
                self._on_over(RefusedError(f"the pool {self._pool} lets no hosts to this run: {message.reason}"))
                self._answered.set()
                return True
            case wire.Ended():
                for host in list(self.hosts.values()):
                    self._withdraw(host, message.reason)
                self._on_over(LeaseError(message.reason))
                return True
        return False

    # --- hosts -------------------------------------------------------------------------------------------------------

    def _update(self, host: PoolHost, message: wire.HostUpdate) -> None:
        match message.state:
            case "ready" if message.agent is not None:
                former, host.task = host.task, asyncio.create_task(self._serve(host, message.agent, host.task))
                if former is not None:
                    former.cancel()
            case "ready":
                if host.state == "leaving" and self.link(host.host_id) is not None:
                    host.released.clear()
                    self._set_state(host, "ready", message.reason)
            case "leaving":
                host.released.clear()
                self._set_state(host, "leaving", message.reason)
            case "withdrawn":
                self._withdraw(host, message.reason)
            case "starting" | "lost":
                if host.state != message.state:
                    self._set_state(host, message.state, message.reason)

    def _withdraw(self, host: PoolHost, reason: str) -> None:
        if host.task is not None:
            host.task.cancel()
        self._set_state(host, "withdrawn", reason)

    async def _serve(self, host: PoolHost, agent: wire.AgentAddress, former: asyncio.Task[None] | None) -> None:
        """From the address of an agent to the end of the connection to it."""
        assert self._session is not None
        if former is not None:
            await asyncio.wait({former})
        placed = PlacedHost(
            host_id=host.host_id,
            url=agent.url,
            token=agent.token,
            pid=agent.pid,
            process_group=agent.process_group,
        )
        self._environments[host.host_id] = agent.environment
        link = None
        try:
            link = await AgentLink.connect(self._session, placed, answer_seconds=agent.contact_timeout_seconds)
            host.link, host.placed = link, placed
            host.released.clear()
            self._set_state(host, "ready", "")
            await link.run(agent.contact_timeout_seconds)
            reason = "its connection broke"
        except (aiohttp.ClientError, OSError) as error:
            reason = f"its agent does not answer: {error}"
        finally:
            if link is not None:
                link.lost.set()
            host.link = host.placed = None
        if host.state in ("starting", "ready"):
            # Lost, or frozen: which of both, the keeper finds out.
            self._outbox.put_nowait(wire.Expel(host_id=host.host_id, pid=agent.pid))
            self._set_state(host, "lost", reason)
