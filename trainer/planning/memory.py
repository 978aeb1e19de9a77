"""Bytes per device under a mesh.

The sum is that of ZeRO (Rajbhandari et al. 2020, section 3): parameters, gradients and optimizer state, each divided
by the mesh axes that shard it, plus what the forward pass keeps for the backward pass of one microbatch. As in
Korthikanti et al. 2022, tensor parallelism divides only a part of the activations. Left out, because they depend on
the compiler: the layer whose parameters are gathered at the moment, and fragmentation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from trainer.planning.footprint import Footprint, LeafSpec, Remat
from trainer.planning.mesh import MeshShape
from trainer.planning.partition import shard_bytes


class MemoryEstimate(BaseModel):
    """Bytes on the fullest device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    params_bytes: int
    optimizer_bytes: int
    """Optimizer state, and the leaves of kind `other`."""
    gradients_bytes: int
    activations_bytes: int
    limit_bytes: int | None
    """None: no limit known."""

    @property
    def total_bytes(self) -> int:
        return self.params_bytes + self.optimizer_bytes + self.gradients_bytes + self.activations_bytes

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.total_bytes <= self.limit_bytes


def estimate_memory(
    footprint: Footprint, mesh: MeshShape, rows_per_shard: int, remat: Remat, limit_bytes: int | None
) -> MemoryEstimate:
    """Memory of a device that works on `rows_per_shard` rows of one microbatch at a time.

    Gradients are the parameters once more, sharded alike: they are accumulated over the microbatches.
    """
    params_bytes, other_bytes = state_bytes(footprint, distinct_leaves(footprint.leaves), mesh)
    return MemoryEstimate(
        params_bytes=params_bytes,
        optimizer_bytes=other_bytes,
        gradients_bytes=params_bytes,
        activations_bytes=rows_per_shard * activation_row_bytes(footprint, mesh.ici_tensor, remat),
        limit_bytes=limit_bytes,
    )


def distinct_leaves(leaves: Iterable[LeafSpec]) -> list[tuple[LeafSpec, int]]:
    """One leaf of each shape, size, logical axes and kind, with how often it occurs: layers repeat."""
    first: dict[object, LeafSpec] = {}
    counts: Counter[object] = Counter()
    for leaf in leaves:
        likeness = (leaf.shape, leaf.itemsize, leaf.axes, leaf.kind)
        first.setdefault(likeness, leaf)
        counts[likeness] += 1
    return [(leaf, counts[likeness]) for likeness, leaf in first.items()]


def state_bytes(footprint: Footprint, leaves: Iterable[tuple[LeafSpec, int]], mesh: MeshShape) -> tuple[int, int]:
    """Bytes of the `train_state` on each device: parameters, and everything else."""
    params_bytes = other_bytes = 0
    for leaf, count in leaves:
        nbytes = count * shard_bytes(leaf, footprint.axis_rules, mesh)
        if leaf.kind == "params":
            params_bytes += nbytes
        else:
            other_bytes += nbytes
    return params_bytes, other_bytes


def activation_row_bytes(footprint: Footprint, ici_tensor: int, remat: Remat) -> int:
    """Bytes that one row keeps on one device from forward to backward."""
    fraction = footprint.activation_tensor_fraction
    return math.ceil(footprint.activation_bytes_per_row[remat] * (1 - fraction + fraction / ici_tensor))
