"""Runs of `shoal train` as real processes, and what can be done to them.

`Run` starts the command in a directory of its own, follows its journal and metrics as they grow, and has a verb for
each thing that befalls a run. Every process that belongs to a run carries a mark in its environment, so that nothing
it leaves behind goes unseen, and nothing else is ever killed.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from trainer import records
from trainer.control.remote import RemoteController
from trainer.control.runtime import agent_files, runtime_root
from trainer.history import RunHistory
from trainer.records import Event, MetricsRecord, parse_event
from trainer.store import LocalStore

T = TypeVar("T")
E = TypeVar("E", bound=Event)

SHOAL = [str(Path(sys.executable).with_name("shoal"))]
STEPS = 60
SAVE_INTERVAL = 10
# Generous: the machine may be busy with other things. A test that waits this long has failed.
PATIENCE_SECONDS = 120.0
_MARK = "SHOAL_TEST_MARK"
_POLL_SECONDS = 0.02
# Makes stdin the controlling terminal of a new session, as a shell's is. Not between fork and exec of this process,
# whose threads may hold any lock then.
_ON_TERMINAL = "import os, sys; os.login_tty(os.dup(0)); os.execvp(sys.argv[1], sys.argv[1:])"


def base_config(directory: Path) -> dict[str, Any]:
    """Four hosts of two devices each; the same seed, data and steps for every run that is compared."""
    return {
        "run_name": "run",
        "storage": str(directory / "runs"),
        "seed": 7,
        "steps": STEPS,
        "global_batch_size": 16,
        "job": "tiny_job:Mlp",
        "num_hosts": {"min": 1, "max": 4},
        "engine": {"devices_per_host": 2, "replacement_delay_seconds": 1.0},
        "elastic": {"contact_timeout_seconds": 3.0},
        "checkpoint": {"save_interval_steps": SAVE_INTERVAL},
    }


def merge(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`{"engine.devices_per_host": 4}` into a nested copy."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = merged
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return merged


def wait_until(condition: Callable[[], T | None], timeout: float, what: Callable[[], str]) -> T:
    """Poll until `condition` gives something true, or fail with what was waited for."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what()}")
        time.sleep(_POLL_SECONDS)
    return result


class Run:
    """One run directory and the processes that train it, one after the other."""

    def __init__(self, directory: Path, environment: dict[str, str], **changes: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.cwd = directory
        self.config = merge(base_config(directory), changes)
        self.directory = directory / "runs" / str(self.config["run_name"])
        self.events: list[Event] = []
        """Everything in the journal so far, in the order it was seen."""
        self.trained: list[tuple[int, MetricsRecord]] = []
        """Every metrics line so far with its incarnation, abandoned ones included."""
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.output = ""
        self._outputs: list[Path] = []
        self._environment = {**environment, _MARK: self.mark}
        self._offsets: dict[Path, int] = {}
        self._terminal: int | None = None
        self._started_at = 0.0
        shutil.copy(Path(__file__).with_name("tiny_job.py"), directory)
        self.config_path = directory / "config.yaml"
        self.config_path.write_text(yaml.safe_dump(self.config))

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.directory)

    # --- starting ----------------------------------------------------------------------------------------------------

    def start(
        self,
        *overrides: str,
        on_terminal: bool = False,
        program: Sequence[str] = (*SHOAL, "train"),
        **environment: str,
    ) -> None:
        """`shoal train CONFIG --set …` in the background; on a pseudo-terminal of its own if asked.

        Another `program` is given the same arguments.
        """
        assert self.process is None or self.process.poll() is not None, "this run is being trained already"
        command = [*program, str(self.config_path), *(part for each in overrides for part in ("--set", each))]
        output = self.cwd / f"output-{len(self._outputs)}.txt"
        self._outputs.append(output)
        self._started_at = time.monotonic()
        env = {**self._environment, **environment}
        if on_terminal:
            controller, terminal = pty.openpty()
            self._terminal = controller
            self.process = subprocess.Popen(
                [sys.executable, "-c", _ON_TERMINAL, *command],
                cwd=self.cwd,
                env=env,
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
            )
            os.close(terminal)
            threading.Thread(target=_copy, args=(controller, output), daemon=True).start()
        else:
            with output.open("wb") as file:
                self.process = subprocess.Popen(
                    command, cwd=self.cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )

    def shoal(self, *arguments: str, timeout: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        """Another `shoal` command, to its end."""
        return subprocess.run(
            [*SHOAL, *arguments],
            cwd=self.cwd,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def train_again(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """`shoal train` of the same configuration, to its end."""
        return self.shoal("train", str(self.config_path), *(p for each in overrides for p in ("--set", each)))

    def imported_by(self, *arguments: str) -> set[str]:
        """Top-level modules that a `shoal` command imports."""
        command = [sys.executable, "-X", "importtime", SHOAL[0], *arguments]
        finished = subprocess.run(
            command, cwd=self.cwd, env=self._environment, capture_output=True, text=True, check=True
        )
        lines = [line for line in finished.stderr.splitlines() if line.startswith("import time:")]
        assert len(lines) > 100
        return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}

    # --- watching ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what journal and metrics have gained."""
        for path in _parts(self.directory / "journal"):
            self.events += [event for line in self._new_lines(path) if (event := parse_event(line)) is not None]
        for path in _parts(self.directory / "metrics"):
            incarnation = int(path.parent.name)
            self.trained += [(incarnation, MetricsRecord.model_validate_json(line)) for line in self._new_lines(path)]

    def _new_lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return whole.splitlines()

    def wait_event(
        self,
        kind: type[E],
        predicate: Callable[[E], bool] = lambda _: True,
        *,
        since: int = 0,
        timeout: float = PATIENCE_SECONDS,
    ) -> E:
        """The first event of a kind that satisfies `predicate`, from the `since`-th event of the journal on."""

        def find() -> E | None:
            ended = self.process is not None and self.process.poll() is not None
            self.look()
            for event in self.events[since:]:
                if isinstance(event, kind) and predicate(event):
                    return event
            if ended:
                raise AssertionError(f"shoal ended without the {kind.__name__} that was waited for\n{self.story()}")
            return None

        return wait_until(find, timeout, lambda: f"{kind.__name__}\n{self.story()}")

    def wait_step(self, step: int, *, since: int = 0, timeout: float = PATIENCE_SECONDS) -> MetricsRecord:
        """The metrics of the first step from `step` on, looking from the `since`-th metrics line on."""

        def find() -> MetricsRecord | None:
            ended = self.process is not None and self.process.poll() is not None
            self.look()
            for _, metrics in self.trained[since:]:
                if metrics.step >= step:
                    return metrics
            if ended:
                raise AssertionError(f"shoal ended before step {step}\n{self.story()}")
            return None

        return wait_until(find, timeout, lambda: f"step {step}\n{self.story()}")

    def wait_end(self, timeout: float = 2 * PATIENCE_SECONDS) -> int:
        """The exit code. Afterwards `output` holds what was printed, and nothing of the run may be left."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:.0f} s\n{self.story()}") from None
        self._after_end()
        return code

    def _after_end(self) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                os.close(self._terminal)
            self._terminal = None
        self.output = self._outputs[-1].read_text(errors="replace")
        self.look()

    def of(self, kind: type[E], predicate: Callable[[E], bool] = lambda _: True) -> list[E]:
        self.look()
        return [event for event in self.events if isinstance(event, kind) and predicate(event)]

    def hosts(self) -> dict[str, dict[str, Any]]:
        """As `shoal hosts --json` lists them, by host id."""
        remote = RemoteController.find(self.store)
        assert remote is not None, f"nobody trains {self.directory}\n{self.story()}"
        return {host["host_id"]: host for host in remote.hosts()}

    def history(self) -> RunHistory:
        return RunHistory.load(self.store)

    def story(self) -> str:
        """What to print when a test fails: the journal, then the output."""
        self.look()
        start = self.events[0].time if self.events else 0.0
        hidden = {"time", "monotonic", "incarnation", "controller", "event", "topology"}
        lines = [f"--- {self.directory}"]
        for event in self.events:
            values = {key: value for key, value in event.model_dump().items() if key not in hidden}
            if isinstance(event, records.GroupStarting):
                values |= {"hosts": event.topology.hosts, "mesh": str(event.topology.mesh)}
            lines.append(f"{event.time - start:7.2f} {event.incarnation:3} {type(event).__name__} {values}")
        for path in self._outputs:
            lines += [f"--- {path.name}", path.read_text(errors="replace")[-4000:]]
        return "\n".join(lines)

    # --- what befalls a run ------------------------------------------------------------------------------------------

    def kill_host(self, *host_ids: str) -> None:
        """SIGKILL the process groups of hosts, one right after the other, as machines that vanish."""
        groups = [self.hosts()[host_id]["process_group"] for host_id in host_ids]
        assert all(groups), f"{host_ids} have no process group"
        for group in groups:
            os.killpg(group, signal.SIGKILL)

    def kill_worker(self, host_id: str) -> None:
        """SIGKILL the worker of a host; its agent lives on."""
        (pid,) = self.hosts()[host_id]["workers"]
        os.kill(pid, signal.SIGKILL)

    def freeze_host(self, host_id: str) -> None:
        """SIGSTOP everything on a host: it neither answers nor ends."""
        os.killpg(self.hosts()[host_id]["process_group"], signal.SIGSTOP)

    def kill_flow(self) -> None:
        """SIGKILL the process of `shoal train` itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._after_end()

    def interrupt(self) -> None:
        """SIGINT to the process of `shoal train` alone."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def press_ctrl_c(self) -> None:
        """As a person does: the terminal sends SIGINT to its whole foreground process group."""
        assert self._terminal is not None
        os.write(self._terminal, b"\x03")

    def set_capacity(self, num_hosts: int) -> None:
        """What `shoal capacity --hosts` asks, without the second that a new process takes."""
        remote = RemoteController.find(self.store)
        assert remote is not None, f"nobody trains {self.directory}\n{self.story()}"
        remote.offer(num_hosts)

    # --- what is left ------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every living process that this run started, however far removed."""
        return list(marked_processes(self.mark))

    def shared_memory(self) -> list[Path]:
        """What lies in the runtime directory on account of this run."""
        self.look()
        root = runtime_root()
        controllers = {event.controller for event in self.events}
        ours = [directory for directory, agent in agent_files(root) if agent.run == str(self.directory.resolve())]
        pools = [root / "pools" / controller for controller in controllers]
        files = [root / "controllers" / f"{controller}.json" for controller in controllers]
        left = sorted({*ours, *(path for path in (*pools, *files) if path.exists())})
        with contextlib.suppress(OSError):
            root.rmdir()  # looking made it
        return left

    def assert_nothing_left(self, within: float = 0.0) -> None:
        """No process of the run and nothing in its memory directory, at the latest after `within` seconds."""

        def clean() -> bool:
            return not self.processes() and not self.shared_memory()

        wait_until(clean, within, lambda: f"{describe(self.processes())} {self.shared_memory()}\n{self.story()}")

    def clean_up(self) -> None:
        """End what a failed test left running. Only processes with this run's mark."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        if self.process is not None:
            self._after_end()
        for path in self.shared_memory():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    entry = f"{_MARK}={mark}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            # Read directly: psutil parses all variables, and this is asked many times.
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def describe(processes: list[psutil.Process]) -> str:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"left: {process.pid} {' '.join(process.cmdline())[:200]}")
    return "\n".join(lines)


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file below with its size and time of change, to prove that nothing was written."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


# --- what users care about -------------------------------------------------------------------------------------------


def assert_same_training(run: Run, reference: Run, *, abandoned: int | None = None, steps: int = STEPS) -> RunHistory:
    """The current line of history equals the undisturbed run's.

    Each step is there once and consumed its own samples; learning rates are equal to the bit; losses are equal to the
    bit as long as every step so far ran on the reference's topology, and to 1e-3 after the first that did not.
    """
    history, undisturbed = run.history(), reference.history()
    assert history.problems == ()
    assert [metrics.step for metrics in history.metrics] == list(range(1, steps + 1)), run.story()
    repeats = Counter((incarnation, metrics.step) for incarnation, metrics in run.trained)
    assert max(repeats.values()) == 1, f"an incarnation reported a step twice: {repeats.most_common(3)}"
    topologies = {span.incarnation: span.topology for span in history.topologies}
    original = undisturbed.topologies[0].topology
    assert original is not None
    same_bits = True
    for mine, theirs in zip(history.steps, undisturbed.steps[:steps], strict=True):
        topology = topologies[mine.incarnation]
        assert topology is not None
        same_bits = same_bits and topology.same_program(original)
        assert mine.record.sample_digest == theirs.record.sample_digest, f"step {mine.step}"
        assert mine.record.learning_rate == theirs.record.learning_rate, f"step {mine.step}"
        assert mine.record.samples == theirs.record.samples == 16
        if same_bits:
            assert mine.record.loss == theirs.record.loss, f"step {mine.step} of incarnation {mine.incarnation}"
        else:
            assert abs(mine.record.loss - theirs.record.loss) <= 1e-3 * abs(theirs.record.loss), f"step {mine.step}"
    if abandoned is not None:
        assert len(history.abandoned) == abandoned
    return history


def assert_complete(run: Run, code: int, *, steps: int = STEPS) -> None:
    """`shoal train` said so, the journal says so, the last step is committed, and every process is gone."""
    assert code == 0, run.story()
    run.assert_nothing_left()
    assert run.events[-1] == run.of(records.RunEnded)[-1]
    ended = run.of(records.RunEnded)[-1]
    assert (ended.outcome, ended.step) == ("complete", steps)
    newest = run.history().newest_commit
    assert newest is not None
    assert newest.step == steps


def down_times(run: Run) -> str:
    """One line per recovery, for the report of a session."""
    return "\n".join(
        f"DOWN {event.cause:15} {event.from_hosts}→{event.to_hosts} {event.down_seconds:5.1f} s  "
        + "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in event.phases.items())
        for event in run.of(records.Recovered)
    )


def _parts(directory: Path) -> list[Path]:
    """`<incarnation>/<number>.jsonl` in order."""
    found = [(int(path.parent.name), int(path.stem), path) for path in directory.glob("*/*.jsonl")]
    return [path for *_, path in sorted(found)]


def _copy(terminal: int, output: Path) -> None:
    """Thread body: what a person would see. A terminal that nobody reads would block the program."""
    with output.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while data := os.read(terminal, 65536):
            file.write(data)
