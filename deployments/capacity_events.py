"""Tells Prefect when the capacity of a pool has changed.

An event is a hint: it may be lost while the server is away. Whoever acts on it looks at the pool itself.
"""

from __future__ import annotations

import asyncio

from prefect.events import emit_event

from tasks.events import CAPACITY_CHANGED
from tasks.scaling import possible_orders
from trainer import wire
from trainer.control.remote import RemotePool
from trainer.errors import RefusedError

GROWTH_LABEL = "shoal.growth"
"""On the event's resource: `possible` if there is a run that free hosts could go to, else `none`."""

# Hosts of a pool come and go together; one event for all that change in this time.
_STILL_SECONDS = 0.3
_RETRY_SECONDS = 1.0


def pool_resource(pool: str) -> str:
    return f"shoal.pool.{pool}"


async def tell_capacity_changes(pool: str) -> None:
    """For ever: an event whenever the pool's hosts have changed, or whom they are free for."""
    version = -1
    told: object = None
    while True:
        try:
            remote = RemotePool.find(pool)
            if (await asyncio.to_thread(remote.newer, version)).version == version:
                continue
            await asyncio.sleep(_STILL_SECONDS)
            view = await asyncio.to_thread(remote.view)
        except RefusedError:
            # No keeper at the moment. The next one counts its versions anew.
            version = -1
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        version = view.version
        state = (view.offered, ready(view), view.free, bool(possible_orders(view)))
        if state != told:
            told = state
            tell(view)


def tell(view: wire.PoolView) -> None:
    emit_event(
        CAPACITY_CHANGED,
        resource={
            "prefect.resource.id": pool_resource(view.pool),
            "prefect.resource.name": f"pool {view.pool}",
            GROWTH_LABEL: "possible" if possible_orders(view) else "none",
        },
        payload={
            "offered": view.offered,
            "source": view.source,
            "price_per_host_hour": view.price_per_host_hour,
            "ready": ready(view),
            "free": list(view.free),
            "tenancies": {tenancy.run: list(tenancy.hosts) for tenancy in view.tenancies},
        },
    )


def ready(view: wire.PoolView) -> int:
    return sum(host.state == "ready" for host in view.hosts)
