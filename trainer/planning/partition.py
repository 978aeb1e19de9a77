"""Which mesh axes shard each dim of an array.

The planner counts bytes with it and `trainer.compute.sharding` builds partition specs from it, so that what was
planned is what is placed. A dim is sharded only where it divides evenly: nothing is ever padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from trainer.planning.footprint import AxisRule, LeafSpec
from trainer.planning.mesh import FSDP_AXES, MeshShape


def partition_dims(
    shape: Sequence[int], axes: Sequence[str | None], axis_rules: Mapping[str, AxisRule], mesh: MeshShape
) -> tuple[tuple[str, ...], ...]:
    """For each dim the mesh axes that shard it, outermost first; `()` for a dim that is replicated.

    At most one dim is sharded over `ici_tensor`, and at most one other dim over the FSDP axes: both of them together
    if some dim divides, else the larger axis alone, else the smaller. Mesh axes of size 1 do not appear.
    """
    assert len(shape) == len(axes), f"{len(shape)} dims but {len(axes)} logical axes"
    rules: tuple[AxisRule, ...] = tuple("fsdp" if axis is None else axis_rules.get(axis, "fsdp") for axis in axes)
    return _partition(tuple(shape), rules, mesh)


# Parameters and their optimizer moments lie alike, and a run plans again and again for the same few meshes.
@lru_cache(maxsize=2**14)
def _partition(shape: tuple[int, ...], rules: tuple[AxisRule, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    placed: list[tuple[str, ...]] = [()] * len(shape)

    if mesh.ici_tensor > 1:
        dim = _largest_divisible(shape, (dim for dim, rule in enumerate(rules) if rule == "tensor"), mesh.ici_tensor)
        if dim is not None:
            placed[dim] = ("ici_tensor",)

    # fsdp dims first: a tensor dim that tensor parallelism left alone is the second choice.
    choices: list[list[int]] = [
        [dim for dim, rule in enumerate(rules) if rule == wanted and not placed[dim]] for wanted in ("fsdp", "tensor")
    ]
    for mesh_axes, size in _fsdp_attempts(mesh):
        for dims in choices:
            dim = _largest_divisible(shape, dims, size)
            if dim is not None:
                placed[dim] = mesh_axes
                return tuple(placed)
    return tuple(placed)


def shard_bytes(leaf: LeafSpec, axis_rules: Mapping[str, AxisRule], mesh: MeshShape) -> int:
    """Bytes of the array on each device."""
    dims = partition_dims(leaf.shape, leaf.axes, axis_rules, mesh)
    shards: int = math.prod(getattr(mesh, mesh_axis) for mesh_axes in dims for mesh_axis in mesh_axes)
    return leaf.nbytes // shards


def _fsdp_attempts(mesh: MeshShape) -> list[tuple[tuple[str, ...], int]]:
    sizes = {axis: size for axis in FSDP_AXES if (size := getattr(mesh, axis)) > 1}
    alone: list[tuple[tuple[str, ...], int]] = [((axis,), size) for axis, size in sizes.items()]
    if len(alone) < 2:
        return alone
    # At equal size the axis inside a slice comes first: its links are faster.
    alone.sort(key=lambda attempt: (attempt[1], attempt[0] == ("ici_fsdp",)), reverse=True)
    return [(tuple(sizes), math.prod(sizes.values())), *alone]


def _largest_divisible(shape: Sequence[int], dims: Iterable[int], size: int) -> int | None:
    divisible = [dim for dim in dims if shape[dim] > 0 and shape[dim] % size == 0]
    return max(divisible, key=lambda dim: (shape[dim], -dim), default=None)
