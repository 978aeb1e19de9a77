"""What `shoal train` shows while it runs: a live block on a terminal, plain lines anywhere else."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from trainer import records
from trainer.history import duration_text
from trainer.narration import Narrator, hosts
from trainer.records import JournalEvent, MetricsRecord

_RATE_WINDOW = 50
_PLAIN_SECONDS = 5.0


class ProgressDisplay:
    """A journal listener. Called on the controller's thread; draws on the caller's console."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._narrator = Narrator()
        self._lock = threading.Lock()
        self._recent: deque[MetricsRecord] = deque(maxlen=_RATE_WINDOW)
        self._topology: records.GroupStarting | None = None
        self._committed: int | None = None
        self._state = "starting"
        self._started = time.monotonic()
        self._productive = 0.0
        self._trained_to = 0
        self._last_plain = 0.0
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=steps)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, item: JournalEvent | MetricsRecord) -> None:
        with self._lock:
            self._update(item)
            line = self._narrator.line(item)
        try:
            if line is not None:
                self._print(line, item)
            elif isinstance(item, MetricsRecord) and not self._console.is_terminal:
                self._print_plain_progress(item)
        except OSError:  # a full disk behind `> log`, a terminal that was closed: the run does not need them
            self._console.quiet = True

    def _update(self, item: JournalEvent | MetricsRecord) -> None:
        match item:
            case MetricsRecord():
                self._recent.append(item)
                if item.step > self._trained_to:
                    self._productive += item.step_seconds
                    self._trained_to = item.step
                self._state = "training"
                self._bar.update(self._task, completed=item.step)
            case records.RunOpened():
                self._committed = item.newest_commit
                self._trained_to = item.newest_commit or 0
                self._bar.update(self._task, completed=self._trained_to)
            case records.GroupStarting():
                self._topology = item
                self._recent.clear()
                self._state = f"starting incarnation {item.incarnation}"
            case records.Incident():
                self._state = f"recovering from {item.cause}"
            case records.CheckpointCommitted():
                self._committed = item.step
            case records.Waiting():
                self._state = "waiting for capacity"
            case records.StopRequested():
                self._state = "stopping"
            case _:
                pass

    # --- figures -----------------------------------------------------------------------------------------------------

    def _step_seconds(self) -> float | None:
        # The first step of a group includes its warm-up.
        seconds = sorted(metrics.step_seconds for metrics in list(self._recent)[1:])
        return seconds[len(seconds) // 2] if seconds else None

    def _figures(self) -> list[str]:
        latest = self._recent[-1] if self._recent else None
        step_seconds = self._step_seconds()
        elapsed = time.monotonic() - self._started
        figures = [self._state]
        if latest is not None:
            figures.append(f"loss {latest.loss:.4f}")
        if latest is not None and step_seconds:
            figures.append(f"{latest.tokens / step_seconds:,.0f} tokens/s")
        if self._topology is not None:
            plan = self._topology.topology
            figures.append(f"{hosts(plan.num_processes)}, {plan.mesh}")
        figures.append("no commit yet" if self._committed is None else f"committed {self._committed}")
        figures.append(f"goodput {min(1.0, self._productive / elapsed):.0%}")
        if step_seconds:
            figures.append(f"left {duration_text(step_seconds * max(0, self._steps - self._trained_to))}")
        return figures

    def _render(self) -> RenderableType:
        with self._lock:
            return Group(self._bar, Text("  " + " · ".join(self._figures()), overflow="fold"))

    # --- lines -------------------------------------------------------------------------------------------------------

    def _print(self, line: str, item: JournalEvent | MetricsRecord) -> None:
        style = "bold red" if isinstance(item, records.Incident | records.CheckpointFailed) else ""
        style = "bold green" if isinstance(item, records.Recovered) else style
        stamp = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{stamp}  ", style="dim").append(line, style=style), soft_wrap=True)

    def _print_plain_progress(self, item: MetricsRecord) -> None:
        now = time.monotonic()
        if now - self._last_plain < _PLAIN_SECONDS and item.step != self._steps:
            return
        self._last_plain = now
        with self._lock:
            figures = self._figures()[1:]
        self._print(f"step {item.step}/{self._steps} · " + " · ".join(figures), item)
