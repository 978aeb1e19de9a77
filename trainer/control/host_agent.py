"""One per host: starts and stops workers, carries their messages, reports their ends.

Run by an engine as `python -P -m trainer.control.host_agent DIRECTORY READY_FD` in a session of its own; its workers
stay in its process group, so that the host dies as one. It serves one controller, over an authenticated WebSocket, and
ends itself when it has heard nothing from that controller for the contact timeout (self-fencing).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict

from trainer import wire
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


class HostAgent:
    def __init__(self, directory: Path, config: AgentConfig, token: str) -> None:
        self._directory = directory
        self._config = config
        self._token = token
        self._workers: dict[int, Worker] = {}  # by pid
        self._highest_incarnation = 0
        self._socket: web.WebSocketResponse | None = None
        self._last_contact = time.monotonic()
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
        agent_file = AgentFile(
            host_id=self._config.host_id,
            run=self._config.run,
            controller=self._config.controller,
            process=identify(os.getpid()),
            process_group=os.getpgid(0),
        )
        write_private(self._directory / "agent.json", agent_file.model_dump_json())
        os.write(ready_fd, f"http://{host}:{port}\n".encode())
        os.close(ready_fd)
        watch = asyncio.create_task(self._watch_contact())
        await self._leaving.wait()
        watch.cancel()
        for worker in self._workers.values():
            worker.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
        await runner.cleanup()
        if os.getpgid(0) == os.getpid():  # a host of its own, as engines start it: what workers started is part of it
            kill_rest_of_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _watch_contact(self) -> None:
        timeout = self._config.contact_timeout_seconds
        while (silent := time.monotonic() - self._last_contact) < timeout:
            await asyncio.sleep(timeout - silent)
        self._leaving.set()

    async def _control(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return web.Response(status=401, text="wrong or missing token")
        if self._socket is not None:
            return web.Response(status=409, text="this host already serves a controller")
        socket = web.WebSocketResponse(max_msg_size=_MESSAGE_LIMIT)
        self._socket = socket
        await socket.prepare(request)
        try:
            self._send(
                wire.Hello(host_id=self._config.host_id, pid=os.getpid(), process_group=os.getpgid(0)),
            )
            async for frame in socket:
                self._last_contact = time.monotonic()
                if frame.type is WSMsgType.TEXT:
                    await self._obey(wire.TO_AGENT.validate_json(frame.data))
        finally:
            self._socket = None
        return socket

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
        task = asyncio.create_task(self._tend(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def _send(self, message: wire.Message) -> None:
        self._send_text(wire.encode(message))

    def _send_text(self, text: str) -> None:
        socket = self._socket
        if socket is None or socket.closed:
            return  # nobody to tell; the contact timeout decides what becomes of the workers
        task = asyncio.create_task(self._deliver(socket, text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, socket: web.WebSocketResponse, text: str) -> None:
        with contextlib.suppress(ConnectionError):
            await socket.send_str(text)


def main() -> None:
    directory, ready_fd = Path(sys.argv[1]), int(sys.argv[2])
    config = AgentConfig.model_validate_json((directory / "agent_config.json").read_bytes())
    token = (directory / "token").read_text()
    asyncio.run(HostAgent(directory, config, token).serve(ready_fd))


if __name__ == "__main__":
    main()
