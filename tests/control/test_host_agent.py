"""A real host agent in a process of its own: who may command it, and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from trainer import wire
from trainer.config import EngineConfig
from trainer.control.agent_link import AgentLink
from trainer.control.engines.local import LocalEngine
from trainer.control.engines.protocol import PlacedHost

DEADLINE_SECONDS = 30.0


def with_agent(
    directory: Path,
    scene: Callable[[LocalEngine, PlacedHost], Awaitable[None]],
    *,
    contact_timeout_seconds: float = 5.0,
) -> None:
    async def run() -> None:
        engine = LocalEngine(
            EngineConfig(),
            contact_timeout_seconds=contact_timeout_seconds,
            run="/run",
            controller="c1",
            pool_directory=directory,
        )
        async with asyncio.timeout(DEADLINE_SECONDS):
            host = await engine.place("host-0")
            try:
                await scene(engine, host)
            finally:
                await engine.remove(host)
        assert not psutil.pid_exists(host.pid)
        assert not (directory / "host-0").exists(), "the host's memory goes with it"

    asyncio.run(run())


def test_only_the_holder_of_the_token_may_command_and_only_one_at_a_time(tmp_path: Path) -> None:
    async def scene(_: LocalEngine, host: PlacedHost) -> None:
        token_file = tmp_path / "host-0" / "token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "host-0").stat().st_mode & 0o777 == 0o700
        assert host.token not in " ".join(psutil.Process(host.pid).cmdline())
        assert os.getpgid(host.pid) == host.process_group == host.pid
        async with aiohttp.ClientSession() as session:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await session.ws_connect(f"{host.url}/control", headers=headers)
                assert refused.value.status == 401
            async with session.ws_connect(
                f"{host.url}/control", headers={"Authorization": f"Bearer {host.token}"}
            ) as socket:
                hello = wire.FROM_AGENT.validate_json((await socket.receive()).data)
                assert hello == wire.Hello(host_id="host-0", pid=host.pid, process_group=host.pid)
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await AgentLink.connect(session, host)
                assert refused.value.status == 409

    with_agent(tmp_path, scene)


def test_an_agent_without_contact_ends_itself_and_says_so_to_nobody(tmp_path: Path) -> None:
    async def scene(engine: LocalEngine, host: PlacedHost) -> None:
        assert "agent ended with 0" in await engine.wait_lost(host)

    with_agent(tmp_path, scene, contact_timeout_seconds=0.5)


def test_an_agent_in_contact_stays_beyond_the_timeout_until_it_is_told_to_leave(tmp_path: Path) -> None:
    async def scene(engine: LocalEngine, host: PlacedHost) -> None:
        async with aiohttp.ClientSession() as session:
            link = await AgentLink.connect(session, host)
            carrying = asyncio.create_task(link.run(1.0))
            lost = asyncio.create_task(engine.wait_lost(host))
            await asyncio.wait({lost}, timeout=3.0)
            assert not lost.done()
            assert not link.lost.is_set()
            link.send(wire.Leave())
            await lost
            await carrying
            assert link.lost.is_set()

    with_agent(tmp_path, scene, contact_timeout_seconds=1.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_agent_takes_its_host_with_it(tmp_path: Path, number: signal.Signals) -> None:
    async def scene(engine: LocalEngine, host: PlacedHost) -> None:
        os.kill(host.pid, number)
        await engine.wait_lost(host)
        assert not (tmp_path / "host-0").exists()

    with_agent(tmp_path, scene)
