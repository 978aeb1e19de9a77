"""Hosts as whoever commands them sees them: a private pool, or a tenancy in one that outlives runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trainer.config import EngineConfig
from trainer.control.agent_link import AgentLink
from trainer.control.engines.protocol import PlacedHost
from trainer.planning.capacity import Capacity, Host, host_order

HostState = Literal["starting", "ready", "lost", "leaving", "withdrawn"]


@dataclass
class PoolHost:
    """What is known of one host id."""

    host_id: str
    state: HostState = "withdrawn"
    placed: PlacedHost | None = None
    link: AgentLink | None = None
    task: asyncio.Task[None] | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no worker group needs a leaving host any more."""


class HostTable:
    """Hosts by id, as whoever commands them sees them. All methods run on its event loop."""

    def __init__(self, config: EngineConfig, on_change: Callable[[PoolHost, str], None]) -> None:
        self._config = config
        self._on_change = on_change
        self.hosts: dict[str, PoolHost] = {}

    def capacity(self) -> Capacity:
        """The hosts that a plan may use now."""
        return Capacity(
            hosts=tuple(
                Host(
                    host_id=host.host_id,
                    slice_index=host_order(host.host_id)[0] // self._config.hosts_per_slice,
                    num_devices=self._config.devices_per_host,
                )
                for host in sorted(self.hosts.values(), key=lambda host: host_order(host.host_id))
                if host.state == "ready" and self.link(host.host_id) is not None
            )
        )

    def link(self, host_id: str) -> AgentLink | None:
        """The living connection to a host, or None."""
        host = self.hosts.get(host_id)
        return host.link if host and host.link and not host.link.lost.is_set() else None

    def _set_state(self, host: PoolHost, state: HostState, reason: str) -> None:
        host.state = state
        self._on_change(host, reason)
