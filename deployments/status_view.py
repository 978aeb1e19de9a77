"""How `shoal status RUN` looks, for people and for scripts."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.history import IncidentView, RunHistory, duration_text

_STATE_STYLES = {
    "running": "bold green",
    "complete": "bold green",
    "waiting": "bold yellow",
    "stopped": "bold yellow",
    "failed": "bold red",
    "dead": "bold red",
}
_INCIDENTS_SHOWN = 5

LiveInfo = Mapping[str, Any]
"""What the holder of the lease knows and the directory does not say yet. All keys are optional and take precedence:
`step` (int), `loss`, `tokens_per_second`, `seconds_left` (floats), `hosts` (list of objects with `host_id` and
`state`), `growth_held` and `message` (str)."""


def status_json(history: RunHistory, live: LiveInfo | None = None) -> dict[str, Any]:
    """The document of `shoal status --json`. Keys are stable; values are plain JSON, null where nothing is known.

    `run_name`, `location`, `state` (running, waiting, complete, stopped, failed or dead), `message`, `step`, `steps`,
    `loss`, `tokens_per_second`, `hosts` (ids that train or trained last), `mesh` (size per axis), `incarnation`,
    `committed_step`, `goodput` (0 to 1), `badput_seconds` (per kind), `elapsed_seconds` (stops not counted),
    `seconds_left`, `abandoned_steps`, `incidents` (all, oldest first, planned resizes included), `pool` (live host
    states), `growth_held` (why the living group does not grow although it could) and `problems`.
    """
    live = live or {}
    topology = history.topology
    return {
        "run_name": None if history.run is None else history.run.config.run_name,
        "location": history.location,
        "state": history.state,
        "message": live.get("message", history.message),
        "step": live.get("step", history.step),
        "steps": history.total_steps,
        "loss": _finite(live.get("loss", history.metrics[-1].loss if history.steps else None)),
        "tokens_per_second": live.get("tokens_per_second", history.tokens_per_second),
        "hosts": [] if topology is None else list(topology.hosts),
        "mesh": None if topology is None else topology.mesh.model_dump(),
        "incarnation": history.events[-1].incarnation if history.events else None,
        "committed_step": None if history.newest_commit is None else history.newest_commit.step,
        "goodput": history.goodput.fraction,
        "badput_seconds": {kind.value: seconds for kind, seconds in history.goodput.badput.items()},
        "elapsed_seconds": history.goodput.running_seconds,
        "seconds_left": live.get("seconds_left", history.seconds_left),
        "abandoned_steps": len(history.abandoned),
        "incidents": [_incident_json(view) for view in history.incidents],
        "pool": live.get("hosts"),
        "growth_held": live.get("growth_held"),
        "problems": list(history.problems),
    }


def _incident_json(view: IncidentView) -> dict[str, Any]:
    return {
        "index": view.index,
        "planned": view.planned,
        "cause": view.cause,
        "hosts": list(view.hosts),
        "time": view.time,
        "step": view.step,
        "resumed_from": view.resumed_from,
        "steps_lost": view.steps_lost,
        "from_hosts": view.from_hosts,
        "to_hosts": view.to_hosts,
        "down_seconds": view.down_seconds,
        "phases": dict(view.phases),
        "part_of": view.part_of,
        "message": view.message,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def render_status(history: RunHistory, live: LiveInfo | None = None) -> RenderableType:
    """The same facts for a terminal: a progress bar, a column of facts and the newest incidents."""
    live = live or {}
    facts = status_json(history, live)
    heading = Text.assemble(
        (facts["run_name"] or "unnamed run", "bold"), "  ", (facts["state"], _STATE_STYLES[facts["state"]])
    )
    if facts["message"]:
        heading.append(f"  {facts['message']}", style="dim")
    parts: list[RenderableType] = [heading]
    if facts["steps"]:
        bar = Table.grid()  # a bare bar does not end its line
        bar.add_row(ProgressBar(total=facts["steps"], completed=facts["step"], width=60))
        parts.append(bar)

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(history, facts):
        grid.add_row(name, value)
    parts.append(grid)

    if history.incidents:
        parts += ["", _incident_table(history)]
    if history.problems:
        parts.append("")
        parts += [Text(f"could not read: {problem}", style="yellow") for problem in history.problems]
    return Group(*parts)


def _facts(history: RunHistory, facts: Mapping[str, Any]) -> list[tuple[str, Text]]:
    of_steps = "" if facts["steps"] is None else f" of {facts['steps']}"
    rows = [("step", f"{facts['step']}{of_steps}")]
    loss, baseline = facts["loss"], None if history.run is None else history.run.data.baseline_loss
    if loss is not None:
        beaten = "" if baseline is None else f"; {history.baseline_name} has {baseline:.4f}"
        rows.append(("loss", f"{loss:.4f}  (step {facts['step']} alone{beaten})"))
    elif history.steps:
        rows.append(("loss", "not finite"))
    if facts["tokens_per_second"] is not None:
        rows.append(("speed", f"{facts['tokens_per_second']:,.0f} tokens/s"))
    topology = history.topology
    if topology is not None:
        idle = f", idle: {', '.join(topology.idle_hosts)}" if topology.idle_hosts else ""
        rows.append(("hosts", f"{len(topology.hosts)}: {', '.join(topology.hosts)}{idle}"))
        rows.append(("mesh", str(topology.mesh)))
    if facts["pool"] is not None:
        rows.append(("pool", ", ".join(f"{host['host_id']} {host['state']}" for host in facts["pool"])))
    if facts["growth_held"] is not None:
        rows.append(("not growing", facts["growth_held"]))
    committed = facts["committed_step"]
    rows.append(("committed", "nothing yet" if committed is None else f"step {committed}"))
    if facts["goodput"] is not None:
        largest = next(iter(history.goodput.badput.items()), None)
        cost = "" if largest is None else f"  (largest cost: {largest[0].value.replace('_', ' ')} {largest[1]:.1f} s)"
        elapsed = duration_text(facts["elapsed_seconds"])
        rows.append(("goodput", f"{100 * facts['goodput']:.1f}% of {elapsed}{cost}"))
    if history.state in ("running", "waiting") and facts["seconds_left"] is not None:
        rows.append(("time left", f"about {duration_text(facts['seconds_left'])} at this speed"))
    rows.append(("storage", history.location))
    return [(name, Text(value)) for name, value in rows]


def _incident_table(history: RunHistory) -> Table:
    shown = history.incidents[-_INCIDENTS_SHOWN:]
    earlier = len(history.incidents) - len(shown)
    title = "incidents and resizes" + (f" (newest {len(shown)} of {len(history.incidents)})" if earlier else "")
    table = Table(title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("when", no_wrap=True)
    table.add_column("what")
    table.add_column("at step", justify="right")
    table.add_column("steps lost", justify="right")
    table.add_column("down", justify="right", no_wrap=True)
    for view in shown:
        if view.part_of is not None:
            down = f"part of {view.part_of}"
        elif view.down_seconds is None:
            down = "not recovered"
        else:
            down = f"{view.down_seconds:.1f} s"
        when = datetime.datetime.fromtimestamp(view.time).astimezone().strftime("%b %d %H:%M:%S")
        lost = "" if view.steps_lost is None else str(view.steps_lost)
        style = "green" if view.planned else "red"
        table.add_row(str(view.index), when, Text(view.title, style=style), str(view.step), lost, down)
    return table
