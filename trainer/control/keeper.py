"""The keeper of a pool: keeps its hosts alive and lets each of them to one run at a time.

    python -P -m trainer.control.keeper POOL_ID CONFIG_FILE

A controller acquires a tenancy over a WebSocket; the tenancy lasts as long as that connection. For each host of it the
controller gets the address of the agent and a token of its own, and talks to the agent directly. A host joins a tenancy
only after its agent has confirmed that no worker of an earlier one is left, and it belongs to the tenancy, through
losses and replacements, until it is given back or the tenancy ends. `Keeper._holdings` is the one place that says
whose a host is.

A keeper that dies takes nothing with it: agents and controllers go on, and the next keeper of the same id takes them
over, if it comes before `keeper_timeout_seconds` are over.

    GET  /pool[?after=VERSION]   PoolView, once there is a newer one than VERSION or a while has passed
    POST /offer {"hosts": N}     how many hosts there are
    POST /enlarge  Enlarge       free hosts for a tenancy
    GET  /tenancy                the WebSocket
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict, Field

from trainer import wire
from trainer.config import PoolConfig
from trainer.control.agent_link import AgentLink
from trainer.control.bearer import only_with
from trainer.control.engines.local import LocalEngine
from trainer.control.hosts import PoolHost
from trainer.control.pool import Pool
from trainer.control.providers import Offer, provider_of
from trainer.control.runtime import (
    KeeperFile,
    agent_files,
    keeper_path,
    living_keepers,
    make_private_directory,
    runtime_root,
    sweep,
    tidy,
    write_private,
)
from trainer.planning.allotment import Claim, allot
from trainer.planning.capacity import host_order
from trainer.processes import identify, is_alive, kill_process_group

_NEWS_SECONDS = 20.0
_LET_SECONDS = 10.0
_GATHER_SECONDS = 3.0
_KEYS_REMEMBERED = 1000


@dataclass
class Tenancy:
    """Who commands some of the hosts: one controller of one run."""

    order: wire.Acquire
    since: float
    connected: bool = False
    """Whether the controller is there. One that does not come back soon after the keeper was started has gone."""
    outbox: asyncio.Queue[wire.Message] = field(default_factory=asyncio.Queue)

    @property
    def id(self) -> str:
        return self.order.tenancy

    def tell(self, message: wire.Message) -> None:
        """Never blocks: a controller that does not read holds up nobody."""
        self.outbox.put_nowait(message)


@dataclass
class Holding:
    """A host is a tenancy's. It stays so until the agent has confirmed that the tenancy's workers are gone."""

    tenancy: Tenancy
    agent_pid: int | None = None
    """Of the agent that obeys the tenant. Another one there is a replacement that was not told yet."""


class Memory(BaseModel):
    """What the next keeper has to know."""

    created: float
    """When the pool was made, in seconds since the epoch: where a trace begins."""
    offered: int


class OfferRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: int = Field(ge=0)


class Keeper:
    def __init__(self, pool_id: str, config: PoolConfig, root: Path) -> None:
        self._id = pool_id
        self._config = config
        self._root = root
        self._token = secrets.token_urlsafe(32)
        directory = root / "pools" / pool_id
        self._memory_path = directory / "keeper.json"
        first = 0 if config.capacity.provider != "local" else config.hosts
        self._memory = _remembered(self._memory_path) or Memory(created=time.time(), offered=first)
        self._price: float | None = None
        self._engine = LocalEngine(
            config.engine,
            contact_timeout_seconds=config.keeper_timeout_seconds,
            run="",
            controller=pool_id,
            pool_directory=directory,
        )
        self._pool = Pool(
            config.engine,
            self._engine,
            self._host_changed,
            num_hosts=min(self._memory.offered, config.hosts),
            contact_timeout_seconds=config.keeper_timeout_seconds,
        )
        self._tenancies: dict[str, Tenancy] = {}  # oldest first
        self._holdings: dict[str, Holding] = {}  # by host id
        self._ordering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by host id
        self._enlarged: dict[str, wire.Enlarge] = {}  # by key
        self._allotting: asyncio.TimerHandle | None = None
        self._version = 0
        self._changed_at = time.time()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; then every host leaves."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        sweep(self._root)
        app = web.Application(middlewares=[only_with(self._token)])
        app.router.add_get("/pool", self._get_pool)
        app.router.add_post("/offer", self._post_offer)
        app.router.add_post("/enlarge", self._post_enlarge)
        app.router.add_get("/tenancy", self._serve_tenant)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._take_over()
            await self._pool.open()
            path = keeper_path(self._root, self._id)
            make_private_directory(path.parent)
            keeper = KeeperFile(
                pool=self._id,
                url=f"http://127.0.0.1:{runner.addresses[0][1]}",
                token=self._token,
                process=identify(os.getpid()),
            )
            write_private(path, keeper.model_dump_json())
            provider = provider_of(self._config.capacity, created=self._memory.created, on_trouble=_say)
            if provider is not None:
                self._start(provider.follow(self._follow_offer))
            await stop.wait()
        finally:
            keeper_path(self._root, self._id).unlink(missing_ok=True)
            await self._pool.close()
            await runner.cleanup()
            for task in self._tasks:
                task.cancel()
            self._engine.close()
            tidy(self._root)

    # --- hosts -------------------------------------------------------------------------------------------------------

    def _host_changed(self, host: PoolHost, reason: str) -> None:
        holding = self._holdings.get(host.host_id)
        if holding is None:
            if host.state == "leaving":
                self._release_leaving()
            else:
                self._allot()
        elif host.state == "ready" and (host.placed is None or host.placed.pid != holding.agent_pid):
            self._start(self._let(host, holding))
        elif host.state == "starting" and holding.agent_pid is not None:
            pass  # it was never gone: this keeper takes it over from an earlier one
        else:
            if host.state == "withdrawn":
                del self._holdings[host.host_id]
            if host.state == "lost":
                holding.agent_pid = None
            holding.tenancy.tell(wire.HostUpdate(host_id=host.host_id, state=host.state, reason=reason))
        self._changed()

    def _take_over(self) -> None:
        """Know again what an earlier keeper has let. The pool takes over the hosts themselves as it opens."""
        for _, agent in agent_files(self._root):
            if agent.controller != self._id or not is_alive(agent.process):
                continue
            if host_order(agent.host_id)[0] >= self._memory.offered:
                kill_process_group(agent.process_group)
            elif (order := agent.let_to) is not None:
                if order.tenancy not in self._tenancies:
                    self._tenancies[order.tenancy] = Tenancy(order, since=time.time())
                    self._start(self._await_return(self._tenancies[order.tenancy]))
                self._holdings[agent.host_id] = Holding(self._tenancies[order.tenancy], agent.process.pid)

    async def _await_return(self, tenancy: Tenancy) -> None:
        await asyncio.sleep(self._config.contact_timeout_seconds)
        if not tenancy.connected and self._tenancies.get(tenancy.id) is tenancy:
            await self._end(tenancy)

    def _free(self) -> tuple[str, ...]:
        return tuple(host.host_id for host in self._pool.capacity().hosts if host.host_id not in self._holdings)

    def _held(self, tenancy: Tenancy) -> tuple[str, ...]:
        return tuple(
            sorted((host for host, holding in self._holdings.items() if holding.tenancy is tenancy), key=host_order)
        )

    def _allot(self) -> None:
        """Free hosts go by themselves to tenancies that cannot train without. Growth is decided elsewhere: `Enlarge`.

        Hosts that come up together go together: a run that began on the first of them would have to resize at once.
        """
        coming = any(
            host.state == "starting" and host.host_id not in self._holdings for host in self._pool.hosts.values()
        )
        if not coming:
            self._allot_now()
        elif self._allotting is None:
            self._allotting = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._allot_now)

    def _allot_now(self) -> None:
        if self._allotting is not None:
            self._allotting.cancel()
            self._allotting = None
        claims = [
            Claim(
                tenancy=tenancy.id,
                held=len(self._held(tenancy)),
                min_hosts=tenancy.order.min_hosts,
                max_hosts=tenancy.order.max_hosts,
            )
            for tenancy in self._tenancies.values()
        ]
        per_slice = self._config.engine.hosts_per_slice
        for tenancy, hosts in allot(self._free(), claims, hosts_per_slice=per_slice, growing=False).items():
            self._give(self._tenancies[tenancy], hosts)

    def _give(self, tenancy: Tenancy, host_ids: tuple[str, ...]) -> None:
        for host_id in host_ids:
            holding = self._holdings[host_id] = Holding(tenancy)
            tenancy.tell(wire.HostUpdate(host_id=host_id, state="starting"))
            self._start(self._let(self._pool.hosts[host_id], holding))
        self._changed()

    async def _let(self, host: PoolHost, holding: Holding) -> None:
        """Have the agent obey the tenant, then tell the tenant where it is."""
        token = secrets.token_urlsafe(32)
        order = wire.Let(
            to=holding.tenancy.order, token=token, contact_timeout_seconds=self._config.contact_timeout_seconds
        )
        async with self._ordering[host.host_id]:
            link = self._pool.link(host.host_id)
            if link is None or self._holdings.get(host.host_id) is not holding or not await self._order(link, order):
                return
            holding.agent_pid = link.host.pid
            if host.state == "ready":
                agent = wire.AgentAddress(
                    url=link.host.url,
                    token=token,
                    pid=link.host.pid,
                    process_group=link.host.process_group,
                    contact_timeout_seconds=self._config.contact_timeout_seconds,
                    environment=self._pool.worker_environment(host.host_id),
                )
                holding.tenancy.tell(wire.HostUpdate(host_id=host.host_id, state="ready", agent=agent))

    async def _vacate(self, host_id: str, holding: Holding) -> None:
        """Take a host back from a tenancy that is over."""
        async with self._ordering[host_id]:
            link = self._pool.link(host_id)
            if link is not None:
                await self._order(link, wire.Let(to=None, token="", contact_timeout_seconds=1.0))
            if self._holdings.get(host_id) is holding:
                del self._holdings[host_id]

    async def _order(self, link: AgentLink, order: wire.Let) -> bool:
        """Whether the agent has confirmed. One that does not is expelled. One order at a time for each host."""
        confirmed = asyncio.Event()
        tenancy = order.to.tenancy if order.to is not None else None

        def hear(_: AgentLink, message: wire.FromAgentMessage) -> None:
            if isinstance(message, wire.LetTo) and message.tenancy == tenancy:
                confirmed.set()

        link.listen(hear)
        link.send(order)
        waiting = {asyncio.create_task(confirmed.wait()), asyncio.create_task(link.lost.wait())}
        try:
            await asyncio.wait(waiting, timeout=_LET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            link.listen(None)
        if not confirmed.is_set() and not link.lost.is_set():
            await self._pool.expel(link.host_id)
        return confirmed.is_set()

    def _release_leaving(self) -> None:
        self._pool.release_leaving(frozenset(self._holdings))

    # --- tenancies ---------------------------------------------------------------------------------------------------

    async def _serve_tenant(self, request: web.Request) -> web.StreamResponse:
        # A controller that answers no ping is frozen or gone: half of this time later its hosts are somebody else's.
        socket = web.WebSocketResponse(heartbeat=2 * self._config.contact_timeout_seconds)
        await socket.prepare(request)
        order = wire.TO_KEEPER.validate_json(await socket.receive_str())
        assert isinstance(order, wire.Acquire), order
        if reason := self._refusal(order):
            await socket.send_str(wire.encode(wire.Refused(reason=reason)))
            await socket.close()
            return socket
        for former in [tenancy for tenancy in self._tenancies.values() if tenancy.order.run == order.run]:
            if former.id != order.tenancy or former.connected:
                former.tell(wire.Ended(reason="another controller of this run has taken over"))
                await self._end(former)
        tenancy = self._tenancies.setdefault(order.tenancy, Tenancy(order, since=time.time()))
        tenancy.connected = True
        self._allot()
        tenancy_hosts = wire.Acquired(hosts=self._held(tenancy))
        sender = asyncio.create_task(_send_all(socket, tenancy_hosts, tenancy.outbox))
        self._changed()
        try:
            async for frame in socket:
                if frame.type is WSMsgType.TEXT:
                    await self._obey(tenancy, wire.TO_KEEPER.validate_json(frame.data))
        finally:
            sender.cancel()
            if self._tenancies.get(tenancy.id) is tenancy:
                self._start(self._end(tenancy))
        return socket

    def _refusal(self, order: wire.Acquire) -> str:
        """Why the hosts of this pool would not do for this run, or ""."""
        keys = ("kind", "platform", "devices_per_host", "hosts_per_slice")
        differing = [
            f"engine.{key} is {getattr(order.engine, key)}, the pool's {getattr(self._config.engine, key)}"
            for key in keys
            if getattr(order.engine, key) != getattr(self._config.engine, key)
        ]
        if differing:
            return f"the hosts of this pool are others: {'; '.join(differing)}"
        if order.min_hosts > self._config.hosts:
            return f"num_hosts.min is {order.min_hosts}, the pool never has more than {self._config.hosts}"
        return ""

    async def _obey(self, tenancy: Tenancy, order: wire.ToKeeperMessage) -> None:
        match order:
            case wire.Release():
                host, holding = self._pool.hosts.get(order.host_id), self._holdings.get(order.host_id)
                if host is not None and host.state == "leaving" and holding is not None and holding.tenancy is tenancy:
                    del self._holdings[order.host_id]
                    tenancy.tell(wire.HostUpdate(host_id=order.host_id, state="withdrawn"))
                    self._release_leaving()
                    self._changed()
            case wire.Expel():
                holding, host = self._holdings.get(order.host_id), self._pool.hosts.get(order.host_id)
                ours = holding is not None and holding.tenancy is tenancy and holding.agent_pid == order.pid
                if ours and host is not None and host.placed is not None and host.placed.pid == order.pid:
                    await self._pool.expel(order.host_id)

    async def _end(self, tenancy: Tenancy) -> None:
        """Return once its hosts are free of it."""
        del self._tenancies[tenancy.id]
        self._changed()
        await asyncio.gather(
            *(
                self._vacate(host_id, holding)
                for host_id, holding in list(self._holdings.items())
                if holding.tenancy is tenancy
            )
        )
        self._release_leaving()
        self._allot()
        self._changed()

    # --- answers -----------------------------------------------------------------------------------------------------

    def view(self) -> wire.PoolView:
        return wire.PoolView(
            pool=self._id,
            version=self._version,
            time=self._changed_at,
            offered=self._pool.offered,
            source=self._config.capacity.provider,
            price_per_host_hour=self._price,
            free=self._free(),
            hosts=tuple(
                wire.HostView(
                    host_id=host.host_id,
                    state=host.state,
                    tenancy=holding.tenancy.id if (holding := self._holdings.get(host.host_id)) else None,
                    pid=host.placed.pid if host.placed else None,
                    process_group=host.placed.process_group if host.placed else None,
                )
                for host in sorted(self._pool.hosts.values(), key=lambda host: host_order(host.host_id))
            ),
            tenancies=tuple(
                wire.TenancyView(
                    tenancy=tenancy.id,
                    run=tenancy.order.run,
                    since=tenancy.since,
                    min_hosts=tenancy.order.min_hosts,
                    max_hosts=tenancy.order.max_hosts,
                    hosts=self._held(tenancy),
                )
                for tenancy in self._tenancies.values()
            ),
            hosts_per_slice=self._config.engine.hosts_per_slice,
        )

    async def _get_pool(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", -1))
        except ValueError:
            return _refuse(f"after={request.query['after']!r} is no version number")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_SECONDS):
                while self._version <= after:
                    await self._news.wait()
        return web.json_response(text=self.view().model_dump_json())

    async def _post_offer(self, request: web.Request) -> web.Response:
        try:
            hosts = OfferRequest.model_validate_json(await request.read()).hosts
        except pydantic.ValidationError as error:
            return _refuse(error.errors()[0]["msg"])
        if hosts > self._config.hosts:
            return _refuse(f"{hosts} hosts asked for, the pool never has more than {self._config.hosts} (pool.hosts)")
        if (provider := self._config.capacity.provider) != "local":
            return _refuse(f"this pool follows a {provider} (pool.capacity.provider): it is not set by hand", 409)
        self._offer(hosts)
        return web.json_response(text=self.view().model_dump_json())

    def _follow_offer(self, offer: Offer) -> None:
        self._price = offer.price_per_host_hour
        self._offer(min(offer.hosts, self._config.hosts))

    def _offer(self, hosts: int) -> None:
        self._memory = self._memory.model_copy(update={"offered": hosts})
        # Made anew: a sweep that did not know of this keeper yet may have taken its empty directory for a dead one's.
        make_private_directory(self._memory_path.parent)
        write_private(self._memory_path, self._memory.model_dump_json())
        self._pool.offer(hosts)
        self._release_leaving()
        self._changed()

    async def _post_enlarge(self, request: web.Request) -> web.Response:
        try:
            order = wire.Enlarge.model_validate_json(await request.read())
        except pydantic.ValidationError as error:
            return _refuse(error.errors()[0]["msg"])
        if self._enlarged.get(order.key) != order:
            if reason := self._objection(order):
                return _refuse(reason, status=409)
            self._give(self._tenancies[order.tenancy], order.hosts)
            self._enlarged[order.key] = order
            if len(self._enlarged) > _KEYS_REMEMBERED:
                del self._enlarged[next(iter(self._enlarged))]
        return web.json_response(text=self.view().model_dump_json())

    def _objection(self, order: wire.Enlarge) -> str:
        if order.key in self._enlarged:
            return f"the key {order.key} was used for another order"
        tenancy = self._tenancies.get(order.tenancy)
        if tenancy is None:
            return f"the tenancy {order.tenancy} is over"
        if taken := sorted(set(order.hosts) - set(self._free()), key=host_order):
            return f"{', '.join(taken)} not free any more"
        if len(self._held(tenancy)) + len(order.hosts) > tenancy.order.max_hosts:
            return f"{tenancy.order.run} takes {tenancy.order.max_hosts} hosts at most"
        return ""

    def _changed(self) -> None:
        self._version += 1
        self._changed_at = time.time()
        self._news.set()
        self._news = asyncio.Event()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)  # into the log; the hosts and what they do go on


async def _send_all(socket: web.WebSocketResponse, first: wire.Message, outbox: asyncio.Queue[wire.Message]) -> None:
    message = first
    while True:
        await socket.send_str(wire.encode(message))
        if isinstance(message, wire.Ended):
            await socket.close()
            return
        message = await outbox.get()


def _remembered(path: Path) -> Memory | None:
    try:
        return Memory.model_validate_json(path.read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None  # no keeper before this one, or one of another version


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _refuse(reason: str, status: int = 400) -> web.Response:
    return web.json_response({"error": reason}, status=status)


def main() -> None:
    pool_id, path = sys.argv[1], Path(sys.argv[2])
    config = PoolConfig.model_validate_json(path.read_bytes())
    if any(keeper.pool == pool_id for keeper in living_keepers(runtime_root())):
        sys.exit(f"the pool {pool_id} has a keeper already")
    asyncio.run(Keeper(pool_id, config, runtime_root()).run())


if __name__ == "__main__":
    main()
