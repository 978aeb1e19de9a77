"""What both benchmarks share: the machine, the quickstart's configuration, a real `shoal train`, figures and tables."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from trainer.config import RunConfig, load_config
from trainer.control.runtime import agent_files, runtime_root, tidy
from trainer.history import RunHistory
from trainer.processes import kill_process_group, tethered
from trainer.records import JournalEvent, parse_event
from trainer.store import LocalStore, run_store

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
# What a developer's shell may say to these programs must not change what is measured.
_FOREIGN_PREFIXES = ("PREFECT_", "JAX_", "XLA_", "SHOAL_")
_STOP_SECONDS = 60.0
_OUTPUT_TAIL_LINES = 30


class BenchmarkError(Exception):
    """What was measured is not what was meant to be measured, so there is no figure."""


# --- the command ---------------------------------------------------------------------------------------------------


def run_benchmark(work: Callable[[Path], None]) -> int:
    """Call `work` with a private directory that is removed afterwards, and return the exit code.

    Ctrl-C and SIGTERM unwind `work`, so that everything it started is ended.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    for name in [name for name in os.environ if name.startswith(_FOREIGN_PREFIXES)]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as directory:
        os.environ["PREFECT_HOME"] = str(Path(directory) / "prefect")
        try:
            work(Path(directory))
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except BenchmarkError as error:
            say(f"failed: {error}")
            return 1
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that both commands have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--hosts", type=positive, default=4, metavar="N", help="hosts of the pool")
    made.add_argument("--devices-per-host", type=positive, default=2, metavar="N", help="virtual CPU devices per host")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    return made


def positive(text: str) -> int:
    """An argparse type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is smaller than 1")
    return number


# --- the machine ---------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}, jax {machine['jax']}, {machine['date']}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def busy_with_others() -> float:
    """Share of all cores that is in use now, over one second. Call it while nothing of ours runs."""
    return psutil.cpu_percent(interval=1.0) / 100


# --- figures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    median: float
    p90: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(statistics.median(values), float(np.percentile(values, 90)), min(values), max(values))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Words in the first column, numbers in the others."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def print_results(machine: dict[str, Any], tables: Sequence[Table], lines: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False, width=130)
    console.print(machine_line(machine))
    for each in tables:
        console.print()
        console.print(each)
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True)


def write_json(path: Path | None, document: object) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


# --- a real run ----------------------------------------------------------------------------------------------------


def quickstart(directory: Path, name: str, hosts: int, devices_per_host: int, **settings: object) -> RunConfig:
    """The quickstart's configuration on another size, with `checkpoint__save_interval_steps=10` and the like."""
    overrides = {
        "run_name": name,
        "storage": str(directory / "runs"),
        "num_hosts.max": hosts,
        "engine.devices_per_host": devices_per_host,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return load_config(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


class ShoalRun:
    """`shoal train` as a process of its own with an embedded Prefect server, from `with` to its end.

    Its session is its own, so that a Ctrl-C reaches it only through us; it is stopped when this process dies.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config = config
        self.store: LocalStore = run_store(config.storage, config.run_name)
        self._config_path = directory / f"{config.run_name}.json"
        self._output_path = directory / f"{config.run_name}.txt"
        self._offsets: dict[Path, int] = {}
        self.events: list[JournalEvent] = []
        """The journal so far."""

    def __enter__(self) -> Self:
        self._config_path.write_text(self.config.model_dump_json())
        shoal = [str(Path(sys.executable).with_name("shoal")), "train", str(self._config_path)]
        with self._output_path.open("wb") as output:
            self._process = subprocess.Popen(
                tethered(shoal, signal.SIGTERM), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def look(self) -> list[JournalEvent]:
        """Read what the journal has gained, and return all of it."""
        paths = (self.store.root / "journal").glob("*/*.jsonl")
        for path in sorted(paths, key=lambda path: (int(path.parent.name), int(path.stem))):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path] = offset + len(whole) + 1
                self.events += [event for line in whole.split(b"\n") if (event := parse_event(line)) is not None]
        return self.events

    def wait_complete(self, timeout_seconds: float) -> RunHistory:
        """Wait for the end of the command, and for nothing less than success."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"no end within {timeout_seconds:.0f} s:\n{self.output_tail()}") from None
        if code != 0:
            raise BenchmarkError(f"`shoal train` ended with {code}:\n{self.output_tail()}")
        return RunHistory.load(self.store)

    def check_alive(self) -> None:
        if (code := self._process.poll()) is not None:
            raise BenchmarkError(f"`shoal train` ended with {code} in the middle:\n{self.output_tail()}")

    def output_tail(self) -> str:
        return "\n".join(self._output_path.read_text(errors="replace").splitlines()[-_OUTPUT_TAIL_LINES:])

    def stop(self) -> None:
        """Ask it to save and end; what does not obey is killed. Nothing of the run is alive or in memory afterwards."""
        family: list[psutil.Process] = []
        if self._process.poll() is None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _, alive = psutil.wait_procs(family, timeout=5.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._clear_memory()

    def _clear_memory(self) -> None:
        # A run that ended in order has done all this itself.
        root = runtime_root()
        for directory, agent in agent_files(root):
            if agent.run == self.store.location:
                kill_process_group(agent.process_group)
                shutil.rmtree(directory, ignore_errors=True)
        for controller in {event.controller for event in self.look()}:
            shutil.rmtree(root / "pools" / controller, ignore_errors=True)
            (root / "controllers" / f"{controller}.json").unlink(missing_ok=True)
        tidy(root)
