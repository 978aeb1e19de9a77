"""Processes as things that can be identified, tied to a parent, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil

from trainer.records import ProcessIdentity

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@cache
def boot_id() -> str:
    """Changes with each boot of the machine; a container shares its host's."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"{socket.gethostname()}-{psutil.boot_time():.0f}"


def identify(pid: int) -> ProcessIdentity:
    """Raises psutil.NoSuchProcess if there is none of that number."""
    return ProcessIdentity(boot_id=boot_id(), pid=pid, start_time=psutil.Process(pid).create_time())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs here. A zombie is dead: it holds no memory and writes nothing."""
    if identity.boot_id != boot_id():
        return False
    try:
        process = psutil.Process(identity.pid)
        # The kernel counts start times in ticks of 10 ms, and psutil adds a boot time that may drift by as much.
        return abs(process.create_time() - identity.start_time) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_process_group(process_group: int) -> None:
    """SIGKILL a whole group; silently nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def kill_rest_of_group() -> None:
    """SIGKILL every other process of this process's own group, such as what a worker's data pipeline has forked."""
    own = os.getpgid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == own:
                process.kill()


def tethered(command: Sequence[str], death_signal: signal.Signals) -> list[str]:
    """The command line that runs `command` tied to this process, by the program `trainer.control.tether`.

    It gets a session of its own, and `death_signal` when this process ends, however that happens.
    """
    tether = [sys.executable, "-P", "-m", "trainer.control.tether", str(os.getpid()), death_signal.name]
    return [*tether, *command]


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `death_signal` when its parent ends, however the parent ends.

    Call it first thing in a child. A parent that died before the call is noticed too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)
