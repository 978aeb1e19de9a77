"""How arrays lie on a mesh. World: meshes of up to 64 devices, as numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.planning.footprint import AxisRule, LeafSpec
from trainer.planning.mesh import FSDP_AXES, MeshShape
from trainer.planning.partition import partition_dims, shard_bytes

RULES: dict[str, AxisRule] = {"mlp": "tensor", "heads": "tensor", "embed": "fsdp", "norm": "none"}


def mesh(dcn_data: int = 1, dcn_fsdp: int = 1, ici_fsdp: int = 1, ici_tensor: int = 1) -> MeshShape:
    return MeshShape(dcn_data=dcn_data, dcn_fsdp=dcn_fsdp, ici_fsdp=ici_fsdp, ici_tensor=ici_tensor)


@pytest.mark.parametrize(
    ("shape", "axes", "on", "expected"),
    [
        pytest.param((8, 12), ("embed", "mlp"), mesh(), ((), ()), id="one device shards nothing"),
        pytest.param((8, 12), ("embed", "mlp"), mesh(dcn_data=4), ((), ()), id="dcn_data never shards state"),
        pytest.param((8, 12), ("embed", "mlp"), mesh(ici_fsdp=4), (("ici_fsdp",), ()), id="fsdp dim before tensor dim"),
        pytest.param(
            (7, 12), ("embed", "mlp"), mesh(ici_fsdp=4), ((), ("ici_fsdp",)), id="tensor dim when no fsdp dim divides"
        ),
        pytest.param(
            (8, 12), (None, "new"), mesh(ici_fsdp=4), ((), ("ici_fsdp",)), id="no axis and no rule count as fsdp"
        ),
        pytest.param((8, 8), ("embed", None), mesh(ici_fsdp=4), (("ici_fsdp",), ()), id="ties by position"),
        pytest.param((12, 8), ("norm", "norm"), mesh(ici_fsdp=4), ((), ()), id="a none rule is never sharded"),
        pytest.param(
            (9, 7), ("embed", "mlp"), mesh(ici_fsdp=2, ici_tensor=2), ((), ()), id="nothing divides: replicate"
        ),
        pytest.param(
            (8, 12), ("embed", "mlp"), mesh(ici_fsdp=2, ici_tensor=4), (("ici_fsdp",), ("ici_tensor",)), id="both kinds"
        ),
        pytest.param(
            (8, 16),
            ("heads", "mlp"),
            mesh(ici_tensor=4),
            ((), ("ici_tensor",)),
            id="the largest tensor dim, and only it",
        ),
        pytest.param(
            (8, 18),
            ("heads", "mlp"),
            mesh(ici_tensor=4),
            (("ici_tensor",), ()),
            id="the largest tensor dim that divides",
        ),
        pytest.param(
            (8, 16),
            ("heads", "mlp"),
            mesh(ici_fsdp=2, ici_tensor=4),
            (("ici_fsdp",), ("ici_tensor",)),
            id="a tensor dim left over serves fsdp",
        ),
        pytest.param(
            (12, 5),
            ("embed", None),
            mesh(dcn_fsdp=2, ici_fsdp=3),
            (("dcn_fsdp", "ici_fsdp"), ()),
            id="both fsdp axes on one dim",
        ),
        pytest.param(
            (4, 9),
            ("embed", "embed"),
            mesh(dcn_fsdp=2, ici_fsdp=3),
            ((), ("ici_fsdp",)),
            id="else the larger axis alone",
        ),
        pytest.param(
            (4, 5), ("embed", "embed"), mesh(dcn_fsdp=2, ici_fsdp=3), (("dcn_fsdp",), ()), id="else the smaller axis"
        ),
        pytest.param(
            (2, 5),
            ("embed", "embed"),
            mesh(dcn_fsdp=2, ici_fsdp=2),
            (("ici_fsdp",), ()),
            id="equal axes: the one inside a slice",
        ),
        pytest.param(
            (3, 12),
            ("embed", "mlp"),
            mesh(dcn_fsdp=2, ici_fsdp=3),
            ((), ("dcn_fsdp", "ici_fsdp")),
            id="both axes on a tensor dim before one axis on an fsdp dim",
        ),
        pytest.param((), (), mesh(ici_fsdp=4), (), id="a scalar"),
        pytest.param((0,), ("embed",), mesh(ici_fsdp=4), ((),), id="an empty dim is not sharded"),
    ],
)
def test_dims_are_sharded_by_the_rules_of_their_logical_axes(
    shape: tuple[int, ...], axes: tuple[str | None, ...], on: MeshShape, expected: tuple[tuple[str, ...], ...]
) -> None:
    assert partition_dims(shape, axes, RULES, on) == expected


small_sizes = st.sampled_from([1, 2, 3, 4, 8])
meshes = st.builds(mesh, small_sizes, small_sizes, small_sizes, small_sizes)
dims = st.lists(
    st.tuples(st.integers(0, 48), st.sampled_from(["mlp", "heads", "embed", "norm", "other", None])), max_size=4
)


@given(dims=dims, on=meshes)
def test_a_sharded_dim_divides_evenly_and_no_mesh_axis_is_used_twice(
    dims: list[tuple[int, str | None]], on: MeshShape
) -> None:
    shape, axes = tuple(size for size, _ in dims), tuple(axis for _, axis in dims)
    placed = partition_dims(shape, axes, RULES, on)
    used = [axis for mesh_axes in placed for axis in mesh_axes]
    assert len(placed) == len(shape)
    assert len(used) == len(set(used))
    assert all(getattr(on, axis) > 1 for axis in used)
    for size, axis, mesh_axes in zip(shape, axes, placed, strict=True):
        assert size % math.prod(getattr(on, mesh_axis) for mesh_axis in mesh_axes) == 0
        rule = "fsdp" if axis is None else RULES.get(axis, "fsdp")
        assert rule != "none" or not mesh_axes
        assert "ici_tensor" not in mesh_axes or (rule == "tensor" and mesh_axes == ("ici_tensor",))
    assert sum(bool(set(mesh_axes) & set(FSDP_AXES)) for mesh_axes in placed) <= 1


@given(dims=dims, on=meshes)
def test_an_array_is_replicated_only_when_no_allowed_dim_divides(
    dims: list[tuple[int, str | None]], on: MeshShape
) -> None:
    shape, axes = tuple(size for size, _ in dims), tuple(axis for _, axis in dims)
    placed = partition_dims(shape, axes, RULES, on)
    if not any(set(mesh_axes) & set(FSDP_AXES) for mesh_axes in placed):
        free = [
            size for size, axis, mesh_axes in zip(shape, axes, placed, strict=True) if not mesh_axes and axis != "norm"
        ]
        for fsdp_axis in FSDP_AXES:
            size = getattr(on, fsdp_axis)
            assert size == 1 or not any(dim and dim % size == 0 for dim in free)


@given(dims=dims, on=meshes)
def test_shards_that_are_not_copies_add_up_to_the_array(dims: list[tuple[int, str | None]], on: MeshShape) -> None:
    leaf = LeafSpec(
        path="w", shape=tuple(size for size, _ in dims), axes=tuple(axis for _, axis in dims), itemsize=4, kind="params"
    )
    placed = partition_dims(leaf.shape, leaf.axes, RULES, on)
    distinct = math.prod(getattr(on, axis) for mesh_axes in placed for axis in mesh_axes)
    assert shard_bytes(leaf, RULES, on) * distinct == leaf.nbytes
