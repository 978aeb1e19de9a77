"""What the pool offers at a moment, as a value."""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field


@lru_cache(maxsize=2**17)
def host_order(host_id: str) -> tuple[int, str]:
    """Sort key of stable host ids: by trailing number, so that host-10 follows host-9."""
    number = re.search(r"(\d+)$", host_id)
    return (int(number.group()) if number else -1, host_id)


class Host(BaseModel):
    """One usable host: its agent answers and it is offered to the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host_id: str
    slice_index: int = Field(ge=0)
    num_devices: int = Field(ge=0)


class Capacity(BaseModel):
    """The usable hosts of a pool, in host order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[Host, ...] = ()

    def whole_slices(self, hosts_per_slice: int) -> list[list[Host]]:
        """Slices all of whose hosts are usable, in slice order. A slice that misses a host cannot be used."""
        slices: dict[int, list[Host]] = {}
        for host in sorted(self.hosts, key=lambda host: host_order(host.host_id)):
            slices.setdefault(host.slice_index, []).append(host)
        return [hosts for _, hosts in sorted(slices.items()) if len(hosts) == hosts_per_slice]

    @classmethod
    def uniform(cls, num_hosts: int, *, devices_per_host: int, hosts_per_slice: int) -> Capacity:
        """`num_hosts` healthy hosts named host-0, host-1, …; slice `i` holds hosts `i * hosts_per_slice` on."""
        return cls(
            hosts=tuple(
                Host(host_id=f"host-{index}", slice_index=index // hosts_per_slice, num_devices=devices_per_host)
                for index in range(num_hosts)
            )
        )
