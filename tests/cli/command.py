"""The real `shoal` command in a process of its own, watched from inside.

A `sitecustomize` that every Python process of the command loads writes down that the process began and which of the
heavy packages it went looking for, however the process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SHOAL = (str(Path(sys.executable).with_name("shoal")),)
HEAVY = frozenset({"prefect", "jax", "flax", "optax", "orbax", "grain", "tensorflow"})
_PATIENCE_SECONDS = 240.0  # the machine may be busy; a command that takes this long hangs

_SPY = f"""
import os, sys

def note(word):
    with open(os.environ["SHOAL_TEST_SPY"], "a") as log:
        log.write(word + "\\n")

class Spy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {set(HEAVY)!r}:
            note(name)

note("process")
sys.meta_path.insert(0, Spy)
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended, and what it and its child processes did on the way."""

    exit_code: int
    stdout: str
    stderr: str
    num_processes: int
    """Python processes, the command itself included."""
    heavy: frozenset[str]
    """Packages of `HEAVY` that any of the processes went looking for."""
    left_behind: tuple[int, ...]
    """Processes of this command that outlived it."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """`shoal` as somebody in `folder` types it, with a Prefect home and nothing else in the environment."""

    folder: Path
    prefect_home: Path
    command: Sequence[str] = SHOAL

    def __call__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
        spy = self.prefect_home.parent / "spy"
        spy.mkdir(exist_ok=True)
        (spy / "sitecustomize.py").write_text(_SPY)
        log = spy / "log"
        log.unlink(missing_ok=True)
        finished = subprocess.run(
            [*self.command, *arguments],
            cwd=self.folder,
            env={
                **plain_environment(),
                "PREFECT_HOME": str(self.prefect_home),
                "PYTHONPATH": str(spy),
                "SHOAL_TEST_SPY": str(log),
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        words = log.read_text().split()
        assert "process" in words, "the spy was not loaded: what it did not see proves nothing"
        return Finished(
            exit_code=finished.returncode,
            stdout=finished.stdout,
            stderr=finished.stderr,
            num_processes=words.count("process"),
            heavy=frozenset(words) & HEAVY,
            left_behind=_processes_with(str(log)),
        )


def plain_environment() -> dict[str, str]:
    """Ours without what tests or a developer may have set for Python, Prefect and JAX."""
    prefixes = ("PREFECT", "JAX", "XLA", "PYTHON", "COLUMNS")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def _processes_with(spy_log: str) -> tuple[int, ...]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SHOAL_TEST_SPY") == spy_log and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return tuple(found)
