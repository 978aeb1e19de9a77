"""The fastest legal mesh for some whole slices.

A mesh is found in two steps. A `Layout` fixes everything that memory depends on: how many devices of each host, and
how they are split between the mesh axes that shard the `train_state`. On a layout, `cheapest` chooses `dcn_data`,
the microbatches and the rematerialization. Layouts are visited in the order of the least time they could need, and the
visit ends when that exceeds the best guess so far: that, and trying only counts that can make a difference
(`useful_counts`), keeps planning for 100,000 devices at about 0.1 s.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainer.config import RunConfig
from trainer.planning.cost import (
    MICROBATCH_SECONDS,
    Traffic,
    communication_seconds,
    compute_seconds,
    estimate_traffic,
)
from trainer.planning.footprint import REMAT_ORDER, Footprint, Remat
from trainer.planning.memory import activation_row_bytes, distinct_leaves, state_bytes
from trainer.planning.mesh import MeshShape

# Communication up to this much per step idles no host. Bandwidths are nominal, so the guess is no better than this;
# and a person who offers four hosts to a toy model expects to see four at work.
FREE_COMMUNICATION_SECONDS = 1e-3

ALL_COUNTS_UP_TO = 32
ENDS_TRIED = 8


class Offer(NamedTuple):
    """The whole slices that may be used."""

    hosts_per_slice: int
    slice_devices: tuple[int, ...]
    """For each slice the devices that every host of it has, ascending."""
    max_slices: int
    """By `num_hosts.max`."""

    def num_slices(self, devices_per_host: int) -> int:
        """Usable slices whose hosts all have that many devices."""
        offering = len(self.slice_devices) - bisect.bisect_left(self.slice_devices, devices_per_host)
        return min(offering, self.max_slices)


class Layout(NamedTuple):
    """A mesh but for `dcn_data`."""

    dcn_fsdp: int
    ici_fsdp: int
    ici_tensor: int
    devices_per_host: int
    data_counts: tuple[int, ...]
    """The values of `dcn_data` worth trying, ascending."""

    def batch_shards(self, dcn_data: int) -> int:
        return dcn_data * self.dcn_fsdp * self.ici_fsdp

    def mesh(self, dcn_data: int) -> MeshShape:
        return MeshShape(dcn_data=dcn_data, dcn_fsdp=self.dcn_fsdp, ici_fsdp=self.ici_fsdp, ici_tensor=self.ici_tensor)


class Candidate(NamedTuple):
    """One way to run a step."""

    layout: Layout
    dcn_data: int
    rows_per_shard: int
    """Of one microbatch on one device."""
    num_microbatches: int
    remat: Remat
    compute_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds

    @property
    def sort_key(self) -> tuple[float | int, ...]:
        """Cheapest first; among equals more hosts, less padding, cheaper communication, simpler mesh."""
        layout = self.layout
        mesh_sizes = (layout.dcn_fsdp, layout.ici_tensor, layout.ici_fsdp, self.dcn_data)
        return (
            judged_seconds(self.compute_seconds, self.communication_seconds),
            -self.dcn_data * layout.dcn_fsdp,
            layout.batch_shards(self.dcn_data) * self.rows_per_shard * self.num_microbatches,
            self.seconds,
            sum(size > 1 for size in mesh_sizes),
            *mesh_sizes,
            self.num_microbatches,
            REMAT_ORDER.index(self.remat),
        )


def judged_seconds(compute_seconds: float, communication_seconds: float) -> float:
    """What a step counts for when meshes are compared."""
    return compute_seconds + max(0.0, communication_seconds - FREE_COMMUNICATION_SECONDS)


class Search:
    """One question: this run on that offer, under a memory limit. `limit_bytes` None: everything fits."""

    def __init__(self, config: RunConfig, footprint: Footprint, limit_bytes: int | None) -> None:
        self._config = config
        self._footprint = footprint
        self._limit_bytes = limit_bytes
        self._leaves = distinct_leaves(footprint.leaves)
        self._remats = [
            remat
            for remat in REMAT_ORDER
            if remat in footprint.activation_bytes_per_row and remat in footprint.remat_flops_factor
        ]
        assert self._remats, "the footprint describes no rematerialization policy"
        dims = {
            size
            for leaf, _ in self._leaves
            for size, axis in zip(leaf.shape, leaf.axes, strict=True)
            if axis is None or footprint.axis_rules.get(axis) != "none"
        }
        self._dim_divisors = sorted({divisor for size in dims for divisor in divisors(size, size)})
        self._state_bytes: dict[tuple[int, int, int], int] = {}
        self._traffic: dict[tuple[int, int, int], Traffic] = {}

    def layouts(self, offer: Offer) -> list[Layout]:
        """All layouts worth trying. Empty when the fixed values of `parallelism` cannot be met."""
        batch = self._config.global_batch_size
        fixed = self._config.parallelism
        max_devices = offer.slice_devices[-1]
        found = []
        for ici_fsdp, ici_tensor, devices_per_host in self._inside_a_slice(offer, max_devices):
            num_slices = offer.num_slices(devices_per_host)
            for dcn_fsdp in self._across_slices(num_slices, ici_fsdp):
                limit = num_slices // dcn_fsdp
                if fixed.dcn_data_parallelism != -1:
                    counts = [fixed.dcn_data_parallelism] if fixed.dcn_data_parallelism <= limit else []
                else:
                    # A batch shard without a row would only wait for the others.
                    rows = batch // (dcn_fsdp * ici_fsdp)
                    counts = useful_counts(min(limit, max(rows, 1)), -(-batch // (dcn_fsdp * ici_fsdp)))
                if counts:
                    found.append(Layout(dcn_fsdp, ici_fsdp, ici_tensor, devices_per_host, tuple(counts)))
        return found

    def cheapest(self, layouts: Iterable[Layout]) -> Candidate | None:
        """None when nothing fits into memory.

        More batch shards than rows are a last resort, for a model that fits in no other way (or slices that are larger
        than the batch): devices then work on padding alone.
        """
        batch = self._config.global_batch_size
        layouts = list(layouts)
        filled = [layout for layout in layouts if layout.batch_shards(layout.data_counts[0]) <= batch]
        best = self._cheapest_of(filled)
        return best if best is not None or len(filled) == len(layouts) else self._cheapest_of(layouts)

    def smallest(self, layouts: Iterable[Layout]) -> tuple[Layout, Remat]:
        """What needs the least memory, at one row per shard and microbatch."""

        def needed(choice: tuple[Layout, Remat]) -> int:
            layout, remat = choice
            return self._state(layout) + activation_row_bytes(self._footprint, layout.ici_tensor, remat)

        return min(((layout, remat) for layout in layouts for remat in self._remats), key=needed)

    def fits(self, offer: Offer) -> bool:
        """Whether some legal plan exists."""
        layouts = self.layouts(offer)
        if not layouts or self._limit_bytes is None:
            return bool(layouts)
        layout, remat = self.smallest(layouts)
        row_bytes = activation_row_bytes(self._footprint, layout.ici_tensor, remat)
        return self._state(layout) + row_bytes <= self._limit_bytes

    def _inside_a_slice(self, offer: Offer, max_devices: int) -> Iterator[tuple[int, int, int]]:
        """`(ici_fsdp, ici_tensor, devices_per_host)` with the same number of devices of each host."""
        fixed = self._config.parallelism
        num_hosts = offer.hosts_per_slice
        if fixed.ici_tensor_parallelism != -1:
            tensors = [fixed.ici_tensor_parallelism]
        else:
            tensors = divisors(self._tensor_divisor(), num_hosts * max_devices)
        for ici_tensor in tensors:
            if fixed.ici_fsdp_parallelism != -1:
                fsdps: Iterable[int] = [fixed.ici_fsdp_parallelism]
            else:
                # Only these multiples give whole devices per host.
                unit = num_hosts // math.gcd(num_hosts, ici_tensor)
                limit = num_hosts * max_devices // (ici_tensor * unit)
                counts = set(useful_counts(limit, self._config.global_batch_size))
                if limit > ALL_COUNTS_UP_TO:
                    offered = {num_hosts * devices // (ici_tensor * unit) for devices in set(offer.slice_devices)}
                    dividing = {size // unit for size in self._dividing(limit * unit) if size % unit == 0}
                    counts |= (offered | dividing) - {0}
                fsdps = (unit * count for count in sorted(counts))
            for ici_fsdp in fsdps:
                devices_per_host, rest = divmod(ici_fsdp * ici_tensor, num_hosts)
                if rest == 0 and devices_per_host <= max_devices:
                    yield ici_fsdp, ici_tensor, devices_per_host

    def _across_slices(self, num_slices: int, ici_fsdp: int) -> Iterable[int]:
        """Values of `dcn_fsdp` worth trying."""
        fixed = self._config.parallelism
        if fixed.dcn_fsdp_parallelism != -1:
            return [fixed.dcn_fsdp_parallelism]
        dividing = self._dividing(num_slices)
        if fixed.dcn_data_parallelism == -1:
            # A size that divides no dim replicates, and then it is dcn_data by another name.
            return sorted({1, *dividing})
        limit = num_slices // fixed.dcn_data_parallelism
        rows = -(-self._config.global_batch_size // (fixed.dcn_data_parallelism * ici_fsdp))
        return sorted({*useful_counts(limit, rows), *dividing})

    def _dividing(self, limit: int) -> list[int]:
        """Sizes up to `limit` that divide some dim which may be sharded."""
        return self._dim_divisors[: bisect.bisect_right(self._dim_divisors, limit)]

    def _tensor_divisor(self) -> int:
        """What an `ici_tensor` of the planner's choice has to divide: each dim that it would shard. 1: none."""
        rules = self._footprint.axis_rules
        largest = [
            max(sizes)
            for leaf, _ in self._leaves
            if (
                sizes := [
                    size
                    for size, axis in zip(leaf.shape, leaf.axes, strict=True)
                    if axis is not None and rules.get(axis) == "tensor"
                ]
            )
        ]
        return math.gcd(*largest) if largest else 1

    def _state(self, layout: Layout) -> int:
        """Bytes per device of parameters, gradients and the rest of the `train_state`."""
        key = (layout.dcn_fsdp, layout.ici_fsdp, layout.ici_tensor)
        if key not in self._state_bytes:
            params_bytes, other_bytes = state_bytes(self._footprint, self._leaves, layout.mesh(1))
            self._state_bytes[key] = 2 * params_bytes + other_bytes
        return self._state_bytes[key]

    def _cheapest_of(self, layouts: Sequence[Layout]) -> Candidate | None:
        floors = sorted((self._floor(layout), layout) for layout in layouts)
        best: Candidate | None = None
        best_key: tuple[float | int, ...] = (math.inf,)
        for floor, layout in floors:
            if floor > best_key[0]:
                break
            for candidate in self._candidates(layout, ceiling=best_key[0]):
                key = candidate.sort_key
                if key < best_key:
                    best, best_key = candidate, key
        return best

    def _floor(self, layout: Layout) -> float:
        """No candidate of the layout has a smaller first sort key.

        One microbatch without padding on the most slices computes least; on the fewest it communicates least.
        """
        shard_rows = -(-self._config.global_batch_size // layout.batch_shards(layout.data_counts[-1]))
        compute = min(self._compute_seconds(layout, remat, shard_rows, 1) for remat in self._remats)
        communication = self._communication_seconds(layout, layout.data_counts[0], shard_rows, 1)
        return judged_seconds(compute, communication)

    def _candidates(self, layout: Layout, ceiling: float) -> Iterator[Candidate]:
        """What fits into memory and computes in no more than `ceiling` seconds."""
        max_rows = {remat: self._max_rows(layout, remat) for remat in self._remats}
        for dcn_data in layout.data_counts:
            shard_rows = -(-self._config.global_batch_size // layout.batch_shards(dcn_data))
            tried = set()
            for remat in self._remats:
                for rows_per_shard in microbatch_rows(shard_rows, max_rows[remat]):
                    # A stronger rematerialization that allows no larger microbatch only costs.
                    if rows_per_shard in tried:
                        continue
                    tried.add(rows_per_shard)
                    num_microbatches = -(-shard_rows // rows_per_shard)
                    compute = self._compute_seconds(layout, remat, rows_per_shard, num_microbatches)
                    if compute > ceiling:
                        continue
                    communication = self._communication_seconds(
                        layout, dcn_data, num_microbatches * rows_per_shard, num_microbatches
                    )
                    yield Candidate(layout, dcn_data, rows_per_shard, num_microbatches, remat, compute, communication)

    def _compute_seconds(self, layout: Layout, remat: Remat, rows_per_shard: int, num_microbatches: int) -> float:
        return (
            compute_seconds(
                self._footprint,
                self._config.engine,
                remat,
                ici_tensor=layout.ici_tensor,
                shard_rows=num_microbatches * rows_per_shard,
            )
            + num_microbatches * MICROBATCH_SECONDS
        )

    def _communication_seconds(self, layout: Layout, dcn_data: int, shard_rows: int, num_microbatches: int) -> float:
        sizes = (layout.dcn_fsdp, layout.ici_fsdp, layout.ici_tensor)
        if sizes not in self._traffic:
            self._traffic[sizes] = estimate_traffic(self._footprint, self._leaves, layout.mesh(1))
        return communication_seconds(
            self._footprint,
            self._config.engine,
            self._traffic[sizes],
            (dcn_data, *sizes),
            shard_rows=shard_rows,
            num_microbatches=num_microbatches,
        )

    def _max_rows(self, layout: Layout, remat: Remat) -> int:
        """Rows of one microbatch that fit on a device; 0: not even one."""
        batch = self._config.global_batch_size
        if self._limit_bytes is None:
            return batch
        row_bytes = activation_row_bytes(self._footprint, layout.ici_tensor, remat)
        free_bytes = self._limit_bytes - self._state(layout)
        return max(0, min(batch, free_bytes // row_bytes)) if row_bytes else batch * (free_bytes >= 0)


def useful_counts(limit: int, rows: int) -> list[int]:
    """Counts from 1 to `limit` worth trying for things that share `rows`, ascending.

    All of them if they are few. Else the smallest, and the two ends of the ranges over which `ceil(rows / count)`, and
    so the time to compute, is the same: within one the cost only grows with the count, and ends are tried from the
    largest count down, since the cost in between lies between the two extremes up to rounding.
    """
    if limit <= ALL_COUNTS_UP_TO:
        return list(range(1, limit + 1))
    counts = set(range(1, ENDS_TRIED + 1))
    count = limit
    for _ in range(ENDS_TRIED):
        if count < 1:
            break
        first = -(-rows // -(-rows // count))
        counts |= {first, count}
        count = first - 1
    return sorted(counts)


def microbatch_rows(shard_rows: int, max_rows: int) -> list[int]:
    """Rows per microbatch worth trying for a shard of `shard_rows`: in the fewest microbatches, and without padding."""
    if max_rows == 0:
        return []
    fewest = -(-shard_rows // max_rows)
    balanced = -(-shard_rows // fewest)
    if balanced * fewest == shard_rows:
        return [balanced]
    return [balanced, divisors(shard_rows, balanced)[-1]]


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of `number` that are at most `limit`, ascending."""
    small = [divisor for divisor in range(1, min(math.isqrt(number), limit) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return small + [divisor for divisor in large if divisor <= limit]
