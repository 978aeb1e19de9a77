"""The embedded engine: each host of the pool is a process group on this machine.

A host's agent, its workers and its memory (a 0700 directory in the runtime directory) die together when the process
group is killed, as they would with a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from pathlib import Path

import psutil

from trainer.config import EngineConfig, RunConfig
from trainer.control.engines.protocol import PlacedHost
from trainer.control.host_agent import AgentConfig
from trainer.control.runtime import agent_file, make_private_directory, write_private
from trainer.planning.capacity import host_order
from trainer.processes import is_alive, kill_process_group

_AGENT_START_SECONDS = 60.0


class LocalEngine:
    """Hosts of one pool. `pool_directory` is created by the caller and removed with `close`.

    `run` and `controller` say whom the agents serve; see `trainer.control.runtime.AgentFile`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        contact_timeout_seconds: float,
        run: str,
        controller: str,
        pool_directory: Path,
    ) -> None:
        self._config = config
        self._contact_timeout_seconds = contact_timeout_seconds
        self._run = run
        self._controller = controller
        self._pool_directory = pool_directory
        self._agents: dict[str, asyncio.subprocess.Process | _Adopted] = {}

    async def place(self, host_id: str) -> PlacedHost:
        return self._adopt(host_id) or await self._start(host_id)

    def _adopt(self, host_id: str) -> PlacedHost | None:
        directory = self._pool_directory / host_id
        agent = agent_file(directory)
        if agent is None or not is_alive(agent.process):
            return None
        try:
            token = (directory / "token").read_text()
            self._agents[host_id] = _Adopted(agent.process.pid)
        except OSError:
            return None  # it has just ended
        return PlacedHost(
            host_id=host_id,
            url=agent.url,
            token=token,
            pid=agent.process.pid,
            process_group=agent.process_group,
        )

    async def _start(self, host_id: str) -> PlacedHost:
        directory = self._pool_directory / host_id
        shutil.rmtree(directory, ignore_errors=True)
        make_private_directory(directory)
        agent_config = AgentConfig(
            host_id=host_id,
            run=self._run,
            controller=self._controller,
            contact_timeout_seconds=self._contact_timeout_seconds,
        )
        token = secrets.token_urlsafe(32)
        write_private(directory / "token", token)
        write_private(directory / "agent_config.json", agent_config.model_dump_json())
        read_fd, write_fd = os.pipe()
        try:
            with (directory / "agent.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "trainer.control.host_agent",
                    str(directory),
                    str(write_fd),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._agents[host_id] = process
        ready = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(ready), os.fdopen(read_fd, "rb")
        )
        url = ""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGENT_START_SECONDS):
                    url = (await ready.readline()).decode().strip()
        except asyncio.CancelledError:
            # The pool closes before it knows this host: nobody else would end it.
            kill_process_group(process.pid)
            await process.wait()
            del self._agents[host_id]
            raise
        finally:
            transport.close()
        placed = PlacedHost(host_id=host_id, url=url, token=token, pid=process.pid, process_group=process.pid)
        if not url:
            reason = _last_line(directory / "agent.log")
            await self.remove(placed)
            raise OSError(f"the agent of {host_id} did not start: {reason}")
        return placed

    async def wait_lost(self, host: PlacedHost) -> str:
        returncode = await self._agents[host.host_id].wait()
        reason = _last_line(self._pool_directory / host.host_id / "agent.log")
        self._bury(host)
        how = "agent ended" if returncode is None else f"agent ended with {returncode}"
        return how + (f": {reason}" if reason else "")

    async def remove(self, host: PlacedHost) -> None:
        process = self._agents.get(host.host_id)
        if process is None:
            return  # buried already; its process group's number may be somebody else's by now
        kill_process_group(host.process_group)
        await process.wait()
        self._bury(host)

    def _bury(self, host: PlacedHost) -> None:
        if self._agents.pop(host.host_id, None) is None:
            return
        # The agent's end may have left its workers (only the agent was killed): they are part of the host.
        kill_process_group(host.process_group)
        shutil.rmtree(self._pool_directory / host.host_id, ignore_errors=True)

    def worker_environment(self, host_id: str) -> dict[str, str]:
        devices = self._config.devices_per_host
        platform = self._config.platform
        # glibc would give a step's large buffers back to the system and fault them in again at the next: on CPU that
        # doubles the time of a small model's step.
        memory = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
        first = host_order(host_id)[0] * devices
        visible = ",".join(str(index) for index in range(first, first + devices))
        match platform:
            case "cpu":
                flags = os.environ.get("XLA_FLAGS", "")
                return memory | {
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
                }
            case "gpu":
                return memory | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": visible}
            case "tpu":
                return memory | {"JAX_PLATFORMS": "tpu", "TPU_VISIBLE_CHIPS": visible}

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._pool_directory)


class _Adopted:
    """An agent that is no child of this process: its end is seen, its return code is not."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if there is none of that number."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()


def measured_device_memory(config: RunConfig) -> int | None:
    """Bytes per device: this machine's memory divided by the devices of a full pool, or None if unknown."""
    if config.engine.platform != "cpu":
        return None  # asking an accelerator would take it from the workers
    return psutil.virtual_memory().total // (config.num_hosts.max * config.engine.devices_per_host)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
