"""`shoal doctor`: what this machine offers a run, each thing tried rather than assumed."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import psutil

from trainer.control.runtime import runtime_root
from trainer.errors import ShoalError
from trainer.processes import kill_process_group
from trainer.store import open_store

_LEAST_MEMORY_BYTES = 64 * 2**20
_DEVICES = "import jax; print(' '.join(f'{d.platform}:{d.device_kind}' for d in jax.devices()))"


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    ok: bool
    text: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(storage: str) -> list[Finding]:
    checks: dict[str, Callable[[], str]] = {
        "python": _python,
        "packages": _packages,
        "cpu and memory": _machine,
        "devices": _devices,
        "host memory": _shared_memory,
        "storage": lambda: _storage(storage),
        "ports": _ports,
        "process control": _process_control,
    }
    return list(_run(checks))


def _run(checks: dict[str, Callable[[], str]]) -> Iterator[Finding]:
    for name, check in checks.items():
        try:
            yield Finding(name=name, ok=True, text=check())
        except (OSError, ShoalError, subprocess.SubprocessError) as error:
            yield Finding(name=name, ok=False, text=str(error))


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise OSError(f"{platform.python_version()}; 3.11, 3.12 or 3.13 is needed")
    return f"{platform.python_version()} at {sys.executable}"


def _packages() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("shoal", "jax", "prefect", "orbax-checkpoint", "flax"))


def _machine() -> str:
    memory = psutil.virtual_memory()
    return f"{psutil.cpu_count()} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"


def _devices() -> str:
    # In a process of its own: whoever asks an accelerator for its name holds it.
    found = subprocess.run(
        [sys.executable, "-P", "-c", _DEVICES], capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode != 0:
        raise OSError(f"jax finds no device: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


def _shared_memory() -> str:
    root = runtime_root()
    free = shutil.disk_usage(root).free
    if free < _LEAST_MEMORY_BYTES:
        raise OSError(f"{root} has only {free / 2**20:.0f} MiB free; {_LEAST_MEMORY_BYTES / 2**20:.0f} MiB are needed")
    return f"{root}, {free / 2**30:.1f} GiB free"


def _storage(location: str) -> str:
    store = open_store(location)
    store.probe_parent()
    nearest = next(path for path in [store.root, *store.root.parents] if path.exists())
    return f"{store.location} can be written, {shutil.disk_usage(nearest).free / 2**30:.1f} GiB free"


def _ports() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5.0):
            return f"loopback works (tried port {port})"


def _process_control() -> str:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    kill_process_group(process.pid)
    process.wait(timeout=10)
    return "process groups can be started and ended"
