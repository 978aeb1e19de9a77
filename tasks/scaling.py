"""Tasks of the scale-up flow: give free hosts of a pool to runs that can use them, and see them grow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from trainer import wire
from trainer.control.remote import RemoteController, RemotePool
from trainer.errors import RefusedError
from trainer.history import RunHistory
from trainer.planning.allotment import Claim, allot
from trainer.records import Recovered
from trainer.store import LocalStore

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Enlargement:
    """Hosts that a run was given."""

    tenancy: str
    run_directory: str
    hosts: tuple[str, ...]
    before: int
    """Hosts that it had."""
    given: float
    """When, in seconds since the epoch."""

    @property
    def run_name(self) -> str:
        return Path(self.run_directory).name

    @property
    def after(self) -> int:
        return self.before + len(self.hosts)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What became of an enlargement."""

    enlargement: Enlargement
    recovered: Recovered | None
    """The first step on the larger group. None: it had not come within the time, or the run ended before."""


def possible_orders(view: wire.PoolView) -> list[wire.Enlarge]:
    """Who would get which free hosts: the oldest tenancy first, as many as it may hold.

    The key names what was seen: an order that is given twice on the same sight is carried out once.
    """
    claims = [
        Claim(
            tenancy=tenancy.tenancy,
            held=len(tenancy.hosts),
            min_hosts=tenancy.min_hosts,
            max_hosts=tenancy.max_hosts,
        )
        for tenancy in view.tenancies
    ]
    allotted = allot(view.free, claims, hosts_per_slice=view.hosts_per_slice, growing=True)
    return [
        wire.Enlarge(key=f"{tenancy}@{view.version}", tenancy=tenancy, hosts=hosts)
        for tenancy, hosts in allotted.items()
    ]


@task(name="enlarge", cache_policy=NO_CACHE, persist_result=False)
def enlarge(pool: RemotePool, order: wire.Enlarge, tenancy: wire.TenancyView) -> Enlargement:
    """Give hosts to a run.

    Raises:
        RefusedError: they are not free any more, or the run has gone: the next look at the pool decides anew.
    """
    pool.enlarge(order)
    return Enlargement(
        tenancy=order.tenancy,
        run_directory=tenancy.run,
        hosts=order.hosts,
        before=len(tenancy.hosts),
        given=time.time(),
    )


@task(name="follow", cache_policy=NO_CACHE, persist_result=False)
def follow(enlargement: Enlargement, seconds: float) -> Growth:
    """Return once the run has made a step on its new hosts, has ended, or `seconds` are over."""
    store = LocalStore(Path(enlargement.run_directory))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (steps_on := hosts_of_steps(store)) is not None:
        if set(enlargement.hosts) <= steps_on:
            recovered = [event for event in RunHistory.load(store).events if isinstance(event, Recovered)]
            grown = [event for event in recovered if event.planned and event.time > enlargement.given]
            return Growth(enlargement=enlargement, recovered=grown[0] if grown else None)
        time.sleep(_LOOK_SECONDS)
    return Growth(enlargement=enlargement, recovered=None)


def hosts_of_steps(store: LocalStore) -> set[str] | None:
    """The hosts of the group that is stepping, none while there is no such group, None if nobody trains the run."""
    remote = RemoteController.find(store)
    if remote is None:
        return None
    try:
        live = remote.live()
    except RefusedError:
        return None
    return set(live["topology"]["hosts"]) if live["stepping"] else set()


def render_growth(growths: list[Growth], *, changed: float, began: float) -> str:
    """Markdown: from the change of capacity to the first step on the larger group, in seconds.

    `changed` and `began` are when the capacity changed and when the flow began, in seconds since the epoch.
    """
    parts = []
    for growth in growths:
        grown, given = growth.recovered, growth.enlargement
        lines = [
            f"**{given.run_name}**: {given.before} → {given.after} hosts ({', '.join(given.hosts)} joined)",
            "",
            "| from the change of capacity to … | seconds |",
            "|---|--:|",
            f"| the flow begins | {began - changed:.2f} |",
            f"| the hosts are the run's | {given.given - changed:.2f} |",
        ]
        if grown is None:
            lines.append("| the first step on them | not seen |")
        else:
            lines.append(f"| the last step before (training goes on until then) | {_last_step(grown) - changed:.2f} |")
            lines += [f"| … {phase}, lasts | {seconds:.2f} |" for phase, seconds in grown.phases.items()]
            lines.append(f"| the first step on {grown.to_hosts} hosts | {grown.time - changed:.2f} |")
            lines += ["", f"Steps lost: {grown.step - grown.resumed_from}. Down time: {grown.down_seconds:.2f} s."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _last_step(grown: Recovered) -> float:
    return grown.time - grown.down_seconds
