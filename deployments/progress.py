"""What `shoal train` shows while it runs: a live block on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from trainer import records
from trainer.history import duration_text
from trainer.narration import Narrator, hosts
from trainer.progress import LiveProgress, ProgressView
from trainer.records import JournalEvent, MetricsRecord

LOG = logging.getLogger("shoal")
_PLAIN_SECONDS = 5.0


class ProgressDisplay:
    """A journal listener. Called on the controller's thread; draws on the caller's console.

    While it is entered, warnings in Shoal's log are lines as well.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._narrator = Narrator()
        self._progress = LiveProgress(steps)
        self._last_plain = 0.0
        self._warnings = _Warnings(self._print)
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
        LOG.addHandler(self._warnings)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        LOG.removeHandler(self._warnings)

    def __call__(self, item: JournalEvent | MetricsRecord) -> None:
        self._progress.update(item)
        line = self._narrator.line(item)
        if line is not None:
            self._print(line, _style(item))
        elif isinstance(item, MetricsRecord) and not self._console.is_terminal:
            self._print_plain_progress(item)

    def _render(self) -> RenderableType:
        view = self._progress.look(time.monotonic())
        self._bar.update(self._task, completed=view.step)
        return Group(self._bar, Text("  " + " · ".join([view.activity, *figures(view)]), overflow="fold"))

    # --- lines -------------------------------------------------------------------------------------------------------

    def _print(self, line: str, style: str = "") -> None:
        stamp = time.strftime("%H:%M:%S")
        try:
            self._console.print(Text(f"{stamp}  ", style="dim").append(line, style=style), soft_wrap=True)
        except OSError:  # a full disk behind `> log`, a terminal that was closed: the run does not need them
            self._console.quiet = True

    def _print_plain_progress(self, item: MetricsRecord) -> None:
        now = time.monotonic()
        view = self._progress.look(now)
        if now - self._last_plain < _PLAIN_SECONDS and item.step != view.steps:
            return
        self._last_plain = now
        self._print(f"step {view.step}/{view.steps} · " + " · ".join(figures(view)))


class _Warnings(logging.Handler):
    """Shoal's own warnings as lines of the display. Prefect's console, where they would go, is silent here."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record), "yellow")


def _style(item: JournalEvent | MetricsRecord) -> str:
    match item:
        case records.Incident() | records.CheckpointFailed():
            return "bold red"
        case records.Recovered():
            return "bold green"
        case _:
            return ""


def figures(view: ProgressView) -> list[str]:
    """What is known of loss, speed, hosts, the newest commit, goodput and the time left."""
    known = []
    if view.loss is not None:
        known.append(f"loss {view.loss:.4f}")
    if view.tokens_per_second is not None:
        known.append(f"{view.tokens_per_second:,.0f} tokens/s")
    if view.topology is not None:
        known.append(f"{hosts(view.topology.num_processes)}, {view.topology.mesh}")
    known.append("no commit yet" if view.committed_step is None else f"committed {view.committed_step}")
    if view.goodput is not None:
        known.append(f"goodput {view.goodput:.0%}")
    if view.seconds_left is not None:
        known.append(f"left {duration_text(view.seconds_left)}")
    return known
