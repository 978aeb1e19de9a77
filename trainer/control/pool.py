"""The pool: which hosts there are, kept alive or replaced.

Each host id has one task that places its agent, connects to it, waits for its loss and, while the pool offers the
host, places it again after the replacement delay, as a spot market or a node pool would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from trainer import wire
from trainer.config import EngineConfig
from trainer.control.agent_link import AgentLink
from trainer.control.engines.protocol import Engine, PlacedHost
from trainer.control.hosts import HostTable, PoolHost
from trainer.planning.capacity import host_order

_RETRY_SECONDS = 2.0


class Pool(HostTable):
    """Hosts that this process places and keeps. `on_change(host, reason)` follows each change of state.

    It begins with `num_hosts`. `contact_timeout_seconds` is the agents': how long they live without a word from here.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        on_change: Callable[[PoolHost, str], None],
        *,
        num_hosts: int,
        contact_timeout_seconds: float,
    ) -> None:
        super().__init__(config, on_change)
        self._num_hosts = num_hosts
        self._engine = engine
        self._contact_timeout_seconds = contact_timeout_seconds
        self._session: aiohttp.ClientSession | None = None
        self.offered = 0

    async def open(self) -> None:
        """Returns before the hosts are there."""
        self._session = aiohttp.ClientSession()
        self.offer(self._num_hosts)

    def offer(self, num_hosts: int) -> None:
        """Change how many hosts the pool offers: host-0 … host-(num_hosts - 1).

        Hosts beyond are leaving: no longer part of `capacity`, but alive until `release_leaving`.
        """
        self.offered = num_hosts
        for index in range(num_hosts):
            host = self.hosts.setdefault(f"host-{index}", PoolHost(f"host-{index}"))
            if host.state == "leaving" and not host.released.is_set() and host.link and not host.link.lost.is_set():
                self._set_state(host, "ready", "offered again before it left")
            elif host.task is None or host.task.done():
                host.task = asyncio.create_task(self._keep(host))
        for host in self.hosts.values():
            if not self.is_offered(host) and host.state in ("starting", "ready", "lost"):
                host.released.clear()
                self._set_state(host, "leaving", "no longer offered")

    def is_offered(self, host: PoolHost) -> bool:
        return host_order(host.host_id)[0] < self.offered

    def worker_environment(self, host_id: str) -> dict[str, str]:
        """As `Engine.worker_environment`."""
        return self._engine.worker_environment(host_id)

    def release_leaving(self, in_use: frozenset[str]) -> None:
        """Let go of leaving hosts that no worker group uses."""
        for host in self.hosts.values():
            if host.state == "leaving" and host.host_id not in in_use:
                host.released.set()

    async def expel(self, host_id: str) -> None:
        """End a host that does not obey; it is replaced like a lost one."""
        host = self.hosts[host_id]
        if host.placed is not None:
            await self._engine.remove(host.placed)

    async def close(self) -> None:
        """End all hosts and return once nothing of them is left."""
        self.offered = 0
        tasks = [host.task for host in self.hosts.values() if host.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _keep(self, host: PoolHost) -> None:
        # Lives as long as the host id is offered, across losses and replacements.
        while self.is_offered(host):
            host.released.clear()
            self._set_state(host, "starting", "")
            try:
                host.placed = await self._engine.place(host.host_id)
            except OSError as error:
                self._set_state(host, "lost", str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                reason = await self._serve(host, host.placed)
            finally:
                # Shielded: a close in the middle of the removal must not leave half a host.
                await asyncio.shield(self._engine.remove(host.placed))
                host.placed = host.link = None
            if host.released.is_set():
                continue  # it left by order; if it is offered again by now, it comes back at once
            if not self.is_offered(host):
                break
            self._set_state(host, "lost", reason)
            delay = self._config.replacement_delay_seconds
            if delay < 0:
                return
            await asyncio.sleep(delay)
        self._set_state(host, "withdrawn", "")

    async def _serve(self, host: PoolHost, placed: PlacedHost) -> str:
        """From a placed agent to its end. Returns the reason."""
        assert self._session is not None
        try:
            host.link = await AgentLink.connect(self._session, placed, answer_seconds=self._contact_timeout_seconds)
        except (aiohttp.ClientError, OSError) as error:
            return f"its agent does not answer: {error}"
        carrying = asyncio.create_task(host.link.run(self._contact_timeout_seconds))
        lost = asyncio.create_task(self._engine.wait_lost(placed))
        released = asyncio.create_task(host.released.wait())
        tasks = {carrying, lost, released}
        try:
            self._set_state(host, "ready" if self.is_offered(host) else "leaving", "")
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if released.done() and not host.link.lost.is_set():
                host.link.send(wire.Leave())
                await asyncio.wait({lost}, timeout=2.0)
                return "withdrawn"
            # A closed connection is the first sign of a lost host; the reason follows with the process's end.
            await asyncio.wait({lost}, timeout=0.2)
            return lost.result() if lost.done() else "its connection broke"
        finally:
            host.link.lost.set()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
