"""One per host: starts and stops workers, carries their messages, reports their ends.

Run by an engine as `python -P -m trainer.control.host_agent DIRECTORY READY_FD` in a session of its own; its workers
stay in its process group, so that the host dies as one. It serves its owner over an authenticated WebSocket, and ends
itself when it has heard nothing from there for the contact timeout (self-fencing).

The owner is the controller of a run, whose workers it starts, or the keeper of a pool, which lets the host to one
controller after the other (`wire.Let`). Between two tenancies, and when a tenant is silent, all workers are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict

from trainer import wire
from trainer.control.bearer import shows
from trainer.control.runtime import AgentFile, write_private
from trainer.processes import identify, kill_rest_of_group

_OUTPUT_LINES = 200
_OUTPUT_LINE_BYTES = 2000
# A worker's message is one line; a failure record with a long traceback is the largest.
_MESSAGE_LIMIT = 16 * 2**20


class AgentConfig(BaseModel):
    """agent_config.json in the host's directory, written by the engine before it starts the agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host_id: str
    run: str
    controller: str
    contact_timeout_seconds: float
    bind_address: str = "127.0.0.1"


class Worker:
    """One worker process: its pipes, the tail of its output and its end."""

    def __init__(self, incarnation: int, process: asyncio.subprocess.Process, events: asyncio.StreamReader) -> None:
        self.incarnation = incarnation
        self.process = process
        self._events = events
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)

    @classmethod
    async def start(cls, incarnation: int, environment: dict[str, str]) -> Worker:
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "trainer.compute.worker",
                str(os.getpid()),
                str(write_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(write_fd,),
                env={**os.environ, **environment},
                limit=_MESSAGE_LIMIT,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        events = asyncio.StreamReader(limit=_MESSAGE_LIMIT)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(events), os.fdopen(read_fd, "rb"))
        return cls(incarnation, process, events)

    def send(self, message: wire.Message) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(wire.json_line(message))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    @property
    def output_tail(self) -> str:
        return "\n".join(self._output)

    async def run(self, forward: Callable[[str], None]) -> int:
        """Pass on messages until the worker has ended and all it said is read. Returns the return code."""
        readers = {asyncio.create_task(self._forward(forward)), asyncio.create_task(self._keep_output())}
        returncode = await self.process.wait()
        # What the worker wrote is in the pipes by now. A grandchild may hold them open for ever, so no waiting for EOF.
        _, pending = await asyncio.wait(readers, timeout=1.0)
        for reader in pending:
            reader.cancel()
        return returncode

    async def _forward(self, forward: Callable[[str], None]) -> None:
        while line := await self._events.readline():
            forward(line.decode().rstrip("\n"))

    async def _keep_output(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        while chunk := await self.process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_OUTPUT_LINE_BYTES:]
            for line in lines[-_OUTPUT_LINES:]:
                self._output.append(line[:_OUTPUT_LINE_BYTES].decode(errors="replace"))
        if rest:
            self._output.append(rest.decode(errors="replace"))


@dataclass
class Tenant:
    """Who commands the workers of a host that a pool lets."""

    token: str
    contact_timeout_seconds: float
    socket: web.WebSocketResponse | None = None
    last_contact: float = 0.0


class HostAgent:
    def __init__(self, directory: Path, config: AgentConfig, token: str) -> None:
        self._directory = directory
        self._config = config
        self._token = token
        self._workers: dict[int, Worker] = {}  # by pid
        self._tending: set[asyncio.Task[None]] = set()  # one for each worker
        self._highest_incarnation = 0
        self._owner: web.WebSocketResponse | None = None
        self._last_contact = time.monotonic()
        self._tenant: Tenant | None = None
        self._obeying = asyncio.Lock()
        """Orders are carried out one after the other: no worker may start while its tenancy ends."""
        self._leaving = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, ready_fd: int) -> None:
        """Serve until told to leave, a signal, or loss of contact; then end the workers and remove the directory."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leaving.set)
        app = web.Application()
        app.router.add_get("/control", self._control)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self._config.bind_address, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"
        self._introduce(None)
        os.write(ready_fd, f"{self._url}\n".encode())
        os.close(ready_fd)
        watch = asyncio.create_task(self._watch_contact())
        await self._leaving.wait()
        watch.cancel()
        for worker in self._workers.values():
            worker.kill()
        if rest := self._tasks | self._tending:
            await asyncio.wait(rest, timeout=2.0)
        await runner.cleanup()
        if self._is_host_of_its_own():
            kill_rest_of_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _introduce(self, let_to: wire.Acquire | None) -> None:
        agent_file = AgentFile(
            host_id=self._config.host_id,
            run=self._config.run,
            controller=self._config.controller,
            process=identify(os.getpid()),
            process_group=os.getpgid(0),
            url=self._url,
            let_to=let_to,
        )
        write_private(self._directory / "agent.json", agent_file.model_dump_json())

    async def _watch_contact(self) -> None:
        timeout = self._config.contact_timeout_seconds
        while (silent := time.monotonic() - self._last_contact) < timeout:
            await asyncio.sleep(timeout - silent)
        self._leaving.set()

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if shows(request, self._token):
            return await self._serve_owner(request)
        if self._tenant is not None and shows(request, self._tenant.token):
            return await self._serve_tenant(request, self._tenant)
        return web.Response(status=401, text="wrong or missing token")

    async def _serve_owner(self, request: web.Request) -> web.StreamResponse:
        if self._owner is not None:
            return web.Response(status=409, text="this host already serves a controller")
        socket = web.WebSocketResponse(max_msg_size=_MESSAGE_LIMIT)
        self._owner = socket
        await socket.prepare(request)
        try:
            self._greet(socket)
            async for frame in socket:
                self._last_contact = time.monotonic()
                if frame.type is WSMsgType.TEXT:
                    async with self._obeying:
                        await self._obey(wire.TO_AGENT.validate_json(frame.data))
        finally:
            self._owner = None
        return socket

    async def _serve_tenant(self, request: web.Request, tenant: Tenant) -> web.StreamResponse:
        if tenant.socket is not None:
            return web.Response(status=409, text="this host already serves its tenant")
        socket = web.WebSocketResponse(max_msg_size=_MESSAGE_LIMIT)
        tenant.socket = socket
        await socket.prepare(request)
        watch = asyncio.create_task(self._watch_tenant(tenant))
        try:
            self._greet(socket)
            async for frame in socket:
                tenant.last_contact = time.monotonic()
                if frame.type is WSMsgType.TEXT:
                    async with self._obeying:
                        if self._tenant is not tenant:
                            break  # let to another meanwhile
                        await self._obey(wire.TO_AGENT.validate_json(frame.data))
        finally:
            watch.cancel()
            tenant.socket = None
            async with self._obeying:
                if self._tenant is tenant:
                    await self._end_workers()  # a controller never comes back to a host that it has lost
        return socket

    async def _watch_tenant(self, tenant: Tenant) -> None:
        tenant.last_contact = time.monotonic()
        timeout = tenant.contact_timeout_seconds
        while (silent := time.monotonic() - tenant.last_contact) < timeout:
            await asyncio.sleep(timeout - silent)
        async with self._obeying:
            if self._tenant is tenant:
                await self._end_workers()
                if tenant.socket is not None:
                    self._start_task(_close(tenant.socket))

    async def _let(self, order: wire.Let) -> None:
        former, self._tenant = self._tenant, None
        if former is not None and former.socket is not None:
            self._start_task(_close(former.socket))
        await self._end_workers()
        if order.to is not None:
            self._tenant = Tenant(token=order.token, contact_timeout_seconds=order.contact_timeout_seconds)
            self._highest_incarnation = 0
        self._introduce(order.to)
        if self._owner is not None:
            self._send_to(self._owner, wire.encode(wire.LetTo(tenancy=order.to.tenancy if order.to else None)))

    async def _end_workers(self) -> None:
        """SIGKILL every worker with what it has started, and return once none is left."""
        for worker in self._workers.values():
            worker.kill()
        if self._is_host_of_its_own():
            kill_rest_of_group()
        if self._tending:
            await asyncio.wait(self._tending)

    def _is_host_of_its_own(self) -> bool:
        """As engines start it; then whatever else is in its process group was started by a worker."""
        return os.getpgid(0) == os.getpid()

    async def _obey(self, message: wire.ToAgentMessage) -> None:
        match message:
            case wire.StartWorker():
                await self._start_worker(message)
            case wire.ToWorker():
                for worker in self._workers.values():
                    if worker.incarnation == message.incarnation:
                        worker.send(message.message)
            case wire.KillWorkers():
                self._highest_incarnation = max(self._highest_incarnation, message.incarnation)
                for worker in self._workers.values():
                    if worker.incarnation <= message.incarnation:
                        worker.kill()
            case wire.Leave():
                self._leaving.set()
            case wire.Let():
                await self._let(message)
            case wire.Contact():
                pass

    async def _start_worker(self, message: wire.StartWorker) -> None:
        if message.incarnation <= self._highest_incarnation:
            return  # its kill order has overtaken it: nobody waits for this worker any more
        self._highest_incarnation = message.incarnation
        worker = await Worker.start(message.incarnation, message.environment)
        pid = worker.process.pid
        self._workers[pid] = worker
        self._send(wire.WorkerStarted(incarnation=message.incarnation, pid=pid))
        worker.send(message.assignment)
        tending = asyncio.create_task(self._tend(worker))
        self._tending.add(tending)
        tending.add_done_callback(self._tending.discard)

    async def _tend(self, worker: Worker) -> None:
        def forward(line: str) -> None:
            # The worker's line is JSON already: it is wrapped, not parsed.
            self._send_text(f'{{"type":"from_worker","incarnation":{worker.incarnation},"message":{line}}}')

        returncode = await worker.run(forward)
        del self._workers[worker.process.pid]
        self._send(
            wire.WorkerExited(
                incarnation=worker.incarnation,
                pid=worker.process.pid,
                returncode=returncode,
                output_tail=worker.output_tail,
            )
        )

    def _greet(self, socket: web.WebSocketResponse) -> None:
        hello = wire.Hello(host_id=self._config.host_id, pid=os.getpid(), process_group=os.getpgid(0))
        self._send_to(socket, wire.encode(hello))

    def _send(self, message: wire.Message) -> None:
        self._send_text(wire.encode(message))

    def _send_text(self, text: str) -> None:
        """To whoever commands the workers."""
        socket = self._tenant.socket if self._tenant is not None else self._owner
        if socket is not None and not socket.closed:
            self._send_to(socket, text)
        # Else nobody is there to tell; the contact timeout decides what becomes of the workers.

    def _send_to(self, socket: web.WebSocketResponse, text: str) -> None:
        self._start_task(_deliver(socket, text))

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _deliver(socket: web.WebSocketResponse, text: str) -> None:
    with contextlib.suppress(ConnectionError):
        await socket.send_str(text)


async def _close(socket: web.WebSocketResponse) -> None:
    await socket.close()


def main() -> None:
    directory, ready_fd = Path(sys.argv[1]), int(sys.argv[2])
    config = AgentConfig.model_validate_json((directory / "agent_config.json").read_bytes())
    token = (directory / "token").read_text()
    asyncio.run(HostAgent(directory, config, token).serve(ready_fd))


if __name__ == "__main__":
    main()
