"""Processes tied to a parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_PARENT = """
import signal, subprocess, sys
from trainer.processes import tethered
child = subprocess.Popen(tethered([sys.executable, "-c", sys.argv[1]], signal.Signals[sys.argv[2]]))
sys.stdin.read()
"""
_CHILD = """
import os, signal
def end(number, _):
    os.write(1, f"ended by {number}".encode())
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, f"{os.getsid(0) == os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("death_signal", "says"), [("SIGTERM", b"ended by 15"), ("SIGKILL", b"")])
def test_a_tethered_program_gets_its_signal_when_its_parent_dies(death_signal: str, says: bytes) -> None:
    command = [sys.executable, "-P", "-c", _PARENT, _CHILD, death_signal]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(os.sep)) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"True\n", "it has a session of its own"
        parent.send_signal(signal.SIGKILL)
        # The pipe ends when the child, who holds the other end, has ended too.
        assert parent.stdout.read() == says
