"""Which free hosts of a pool go to which run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.planning.capacity import host_order


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a tenancy holds and may hold, in hosts."""

    tenancy: str
    held: int
    min_hosts: int
    """With fewer it cannot train."""
    max_hosts: int


def allot(
    free: Sequence[str], claims: Sequence[Claim], *, hosts_per_slice: int, growing: bool
) -> dict[str, tuple[str, ...]]:
    """Free hosts for each tenancy that gets any; `claims` in the order of precedence.

    Whole slices only, lowest host ids first. A tenancy below its minimum gets as many as it may hold, but nothing if
    that would not reach the minimum: hosts that wait for others to come would be lost to everybody. One that can train
    already gets more only if `growing`.
    """
    slices = whole_slices(free, hosts_per_slice)
    allotted = {}
    for claim in claims:
        affordable = min(len(slices), (claim.max_hosts - claim.held) // hosts_per_slice)
        in_need = claim.held < claim.min_hosts
        enough = claim.held + affordable * hosts_per_slice >= claim.min_hosts
        if affordable > 0 and enough and (in_need or growing):
            allotted[claim.tenancy] = tuple(host for hosts in slices[:affordable] for host in hosts)
            slices = slices[affordable:]
    return allotted


def whole_slices(host_ids: Sequence[str], hosts_per_slice: int) -> list[tuple[str, ...]]:
    """The slices of which no host is missing, lowest first. Slice `i` holds hosts `i * hosts_per_slice` on."""
    slices: dict[int, list[str]] = {}
    for host_id in sorted(host_ids, key=host_order):
        slices.setdefault(host_order(host_id)[0] // hosts_per_slice, []).append(host_id)
    return [tuple(hosts) for _, hosts in sorted(slices.items()) if len(hosts) == hosts_per_slice]
