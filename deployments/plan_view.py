"""How `shoal plan` looks: what would be built on given hosts, or why nothing can be."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from trainer.planning.footprint import Footprint
from trainer.planning.topology import MESH_AXES, MemoryEstimate, Refusal, TopologyPlan


def render_plan(plan: TopologyPlan, footprint: Footprint) -> RenderableType:
    """The plan as a column of facts, its memory part by part, and the planner's own remarks."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(plan, footprint):
        grid.add_row(name, Text(value))
    parts: list[RenderableType] = [Text("plan", style="bold"), grid, "", _memory_table(plan.memory)]
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def render_refusal(refusal: Refusal) -> RenderableType:
    return Group(
        Text.assemble(("refused: ", "bold red"), refusal.reason),
        Text.assemble(("needed:  ", "bold"), refusal.needed),
    )


def _facts(plan: TopologyPlan, footprint: Footprint) -> list[tuple[str, str]]:
    axes = ", ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, plan.mesh.sizes, strict=True))
    idle = [*plan.idle_hosts]
    if plan.idle_devices_per_host:
        idle.append(f"{_devices(plan.idle_devices_per_host)} of each used host")
    parameters = sum(math.prod(leaf.shape) for leaf in footprint.leaves if leaf.kind == "params")
    flops = footprint.flops_per_row * footprint.remat_flops_factor[plan.remat] * plan.global_batch_size
    padding = f"{plan.padding_rows} of them padding" if plan.padding_rows else "no padding"
    total_rows = plan.num_microbatches * plan.rows_per_microbatch
    return [
        ("mesh", f"{plan.mesh}  ({axes})"),
        ("hosts", f"{len(plan.hosts)}: {', '.join(plan.hosts)}, {_devices(plan.devices_per_host)} each"),
        ("idle", ", ".join(idle) or "none"),
        ("slices", f"{plan.mesh.num_slices} of {plan.hosts_per_slice} host{'' if plan.hosts_per_slice == 1 else 's'}"),
        ("global batch", f"{plan.global_batch_size} samples"),
        ("microbatches", f"{plan.num_microbatches} of {plan.rows_per_microbatch} rows: {total_rows} rows, {padding}"),
        ("rematerialization", plan.remat),
        ("model", f"{parameters:,} parameters, {flops:.3g} FLOPs per step"),
        ("cost model's guess", f"{_seconds(plan.step_seconds_guess)} per step; it ranks meshes and predicts nothing"),
    ]


def _memory_table(memory: MemoryEstimate) -> Table:
    table = Table(title="memory of the fullest device", title_justify="left", title_style="dim", box=box.SIMPLE_HEAD)
    table.add_column("part")
    table.add_column("estimate", justify="right")
    table.add_column("of the limit", justify="right")
    rows = [
        ("parameters", memory.params_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("gradients", memory.gradients_bytes),
        ("activations", memory.activations_bytes),
    ]
    for name, nbytes in rows:
        table.add_row(name, decimal(nbytes), _share(nbytes, memory.limit_bytes))
    table.add_section()
    style = "bold" if memory.fits else "bold red"
    table.add_row("together", decimal(memory.total_bytes), _share(memory.total_bytes, memory.limit_bytes), style=style)
    table.add_row("limit", "unknown" if memory.limit_bytes is None else decimal(memory.limit_bytes), "")
    return table


def _share(nbytes: int, limit_bytes: int | None) -> str:
    return "" if limit_bytes is None else f"{100 * nbytes / limit_bytes:.1f}%"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"
