"""The controller's end of the connection to one host agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from trainer import wire
from trainer.control.engines.protocol import PlacedHost

_CONTACTS_PER_TIMEOUT = 5


class AgentLink:
    """Messages to and from one agent. `lost` is set when the connection ends; a link is never reconnected."""

    def __init__(self, host: PlacedHost, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.host = host
        self.lost = asyncio.Event()
        self.worker_pids: set[int] = set()
        self._socket = socket
        self._listener: Callable[[AgentLink, wire.FromAgentMessage], None] | None = None
        self._outbox: asyncio.Queue[wire.Message] = asyncio.Queue()

    @classmethod
    async def connect(
        cls, session: aiohttp.ClientSession, host: PlacedHost, *, answer_seconds: float | None = None
    ) -> AgentLink:
        """Connect to an agent. One that later leaves a ping unanswered for `answer_seconds` is lost: it is frozen.

        Raises:
            aiohttp.ClientError, TimeoutError: the agent does not answer or refuses the token.
        """
        async with asyncio.timeout(answer_seconds):
            socket = await session.ws_connect(
                f"{host.url}/control",
                headers={"Authorization": f"Bearer {host.token}"},
                max_msg_size=0,
                heartbeat=answer_seconds and 2 * answer_seconds,  # aiohttp waits half of it for the answer
            )
        return cls(host, socket)

    @property
    def host_id(self) -> str:
        return self.host.host_id

    def listen(self, listener: Callable[[AgentLink, wire.FromAgentMessage], None] | None) -> None:
        """Give what the agent says to `listener`, called on the event loop in order. One listener at a time."""
        self._listener = listener

    def send(self, message: wire.Message) -> None:
        """Never blocks. What is sent to a lost agent is dropped: its loss is known by `lost`."""
        self._outbox.put_nowait(message)

    async def run(self, contact_timeout_seconds: float) -> None:
        """Carry messages until the connection ends."""
        sender = asyncio.create_task(self._send_all(contact_timeout_seconds / _CONTACTS_PER_TIMEOUT))
        try:
            async for frame in self._socket:
                if frame.type is aiohttp.WSMsgType.TEXT:
                    self._receive(wire.FROM_AGENT.validate_json(frame.data))
        finally:
            self.lost.set()
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError, aiohttp.ClientError):
                await sender
            await self._socket.close()

    async def _send_all(self, contact_interval: float) -> None:
        while True:
            try:
                async with asyncio.timeout(contact_interval):
                    message = await self._outbox.get()
            except TimeoutError:
                message = wire.Contact()
            await self._socket.send_str(wire.encode(message))

    def _receive(self, message: wire.FromAgentMessage) -> None:
        match message:
            case wire.WorkerStarted():
                self.worker_pids.add(message.pid)
            case wire.WorkerExited():
                self.worker_pids.discard(message.pid)
        if self._listener is not None:
            self._listener(self, message)
