"""A pool on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer import wire


def render_pool(view: wire.PoolView) -> RenderableType:
    """Its hosts with whose they are, and how many it offers."""
    runs = {tenancy.tenancy: tenancy.run for tenancy in view.tenancies}
    table = Table(box=None)
    for column in ("host", "state", "pid", "process group", "run"):
        table.add_column(column)
    for host in view.hosts:
        numbers = (str(number or "-") for number in (host.pid, host.process_group))
        table.add_row(host.host_id, host.state, *numbers, Text(runs.get(host.tenancy or "", "-")))
    waiting = [tenancy for tenancy in view.tenancies if len(tenancy.hosts) < tenancy.min_hosts]
    price = "" if view.price_per_host_hour is None else f", {view.price_per_host_hour:g} per host and hour"
    lines = [f"pool {view.pool}: {view.offered} hosts offered ({view.source}{price}), {len(view.free)} free"]
    lines += [f"{tenancy.run} waits for {tenancy.min_hosts} hosts" for tenancy in waiting]
    return Group(*(Text(line) for line in lines), table)
