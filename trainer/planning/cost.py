"""How long a step might take, to rank meshes by.

Compute is the work of one device over its rate; communication is the bytes that one device moves over the bandwidth
of the links they cross, by the ring formulas: all-reduce over n moves 2(n-1)/n of the array, all-gather and
reduce-scatter (n-1)/n. The two are added, as if nothing overlapped. Parameters are gathered for the forward and again
for the backward pass, and gradients reduced, once per microbatch: accumulators are laid out like the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from trainer.config import EngineConfig
from trainer.planning.footprint import Footprint, LeafSpec, Remat
from trainer.planning.mesh import MeshShape
from trainer.planning.partition import partition_dims

# Dispatch of one microbatch, and latency of one more mesh axis. They only have to break ties.
MICROBATCH_SECONDS = 1e-4
AXIS_SECONDS = 1e-5


class Traffic(NamedTuple):
    """Bytes of each device per microbatch. Independent of `dcn_data`, over which nothing but gradients move."""

    ici_bytes: int
    """Gathers and reductions inside a slice."""
    dcn_fsdp_bytes: int
    """Gathers and reduce-scatters over `dcn_fsdp`."""
    data_gradient_bytes: int
    """Gradients all-reduced over `dcn_data`."""
    slices_gradient_bytes: int
    """Gradients all-reduced over all slices: those of leaves that `dcn_fsdp` does not shard."""


def estimate_traffic(footprint: Footprint, leaves: Iterable[tuple[LeafSpec, int]], mesh: MeshShape) -> Traffic:
    ici = dcn_fsdp = data = slices = 0.0
    for leaf, count in leaves:
        if leaf.kind != "params":
            continue
        mesh_axes = {axis for dim in partition_dims(leaf.shape, leaf.axes, footprint.axis_rules, mesh) for axis in dim}
        shard = count * leaf.nbytes // math.prod(getattr(mesh, axis) for axis in mesh_axes)
        gathered_over_dcn = shard * mesh.dcn_fsdp if "dcn_fsdp" in mesh_axes else shard
        if "ici_fsdp" in mesh_axes:
            ici += 3 * (mesh.ici_fsdp - 1) * gathered_over_dcn
        else:
            ici += all_reduce_factor(mesh.ici_fsdp) * gathered_over_dcn
        if "dcn_fsdp" in mesh_axes:
            dcn_fsdp += 3 * (mesh.dcn_fsdp - 1) * shard
        if "dcn_fsdp" in mesh_axes or mesh.dcn_fsdp == 1:
            data += shard
        else:
            slices += shard
    return Traffic(round(ici), round(dcn_fsdp), round(data), round(slices))


def all_reduce_factor(size: int) -> float:
    """Share of an array that each member of a ring of `size` sends in an all-reduce."""
    return 2 * (size - 1) / size


def compute_seconds(
    footprint: Footprint, engine: EngineConfig, remat: Remat, *, ici_tensor: int, shard_rows: int
) -> float:
    """Work on the rows, padding included, that one batch shard sees over the whole step."""
    work = footprint.flops_per_row * footprint.remat_flops_factor[remat] * shard_rows
    return work / (ici_tensor * engine.device_flops_per_second)


def communication_seconds(
    footprint: Footprint,
    engine: EngineConfig,
    traffic: Traffic,
    mesh_sizes: tuple[int, int, int, int],
    *,
    shard_rows: int,
    num_microbatches: int,
) -> float:
    dcn_data, dcn_fsdp, _, ici_tensor = mesh_sizes
    dcn_bytes = (
        traffic.dcn_fsdp_bytes
        + all_reduce_factor(dcn_data) * traffic.data_gradient_bytes
        + all_reduce_factor(dcn_data * dcn_fsdp) * traffic.slices_gradient_bytes
    )
    tensor_bytes = all_reduce_factor(ici_tensor) * shard_rows * footprint.tensor_reduce_bytes_per_row
    return (
        num_microbatches * (traffic.ici_bytes / engine.ici_bytes_per_second + dcn_bytes / engine.dcn_bytes_per_second)
        + tensor_bytes / engine.ici_bytes_per_second
        + AXIS_SECONDS * sum(size > 1 for size in mesh_sizes)
    )
