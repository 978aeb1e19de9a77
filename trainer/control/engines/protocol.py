"""What a pool asks of an engine: to place a host agent and to say how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class PlacedHost:
    """A host agent that answers."""

    host_id: str
    url: str
    token: str
    pid: int
    process_group: int


class Engine(Protocol):
    """Places host agents. Called on the controller's event loop only."""

    async def place(self, host_id: str) -> PlacedHost:
        """Start the agent of this host and return once it answers.

        An agent that an earlier process of the same pool has left alive is taken over instead.

        Raises:
            OSError: the agent could not be started; the pool tries again later.
        """
        ...

    async def wait_lost(self, host: PlacedHost) -> str:
        """Return, with a reason, once this placement of the host is gone; its memory is removed by then."""
        ...

    async def remove(self, host: PlacedHost) -> None:
        """End the host with everything on it and return once it is gone."""
        ...

    def worker_environment(self, host_id: str) -> dict[str, str]:
        """Variables that make a worker on this host see the host's devices."""
        ...
