"""Bytes per device, against sums done by hand. World: a two-leaf model on up to 2 slices of 8 devices."""

from __future__ import annotations

import pytest

from trainer.planning.footprint import Footprint, LeafSpec, Remat
from trainer.planning.memory import MemoryEstimate, distinct_leaves, estimate_memory
from trainer.planning.mesh import MeshShape

W_BYTES = 64 * 128 * 4
SCALE_BYTES = 64 * 4
STEP_BYTES = 8


def leaf(kind: str, shape: tuple[int, ...], axes: tuple[str | None, ...], itemsize: int = 4) -> LeafSpec:
    return LeafSpec.model_validate(
        {"path": f"{kind}/{shape}", "shape": shape, "itemsize": itemsize, "axes": axes, "kind": kind}
    )


FOOTPRINT = Footprint(
    leaves=(
        leaf("params", (64, 128), ("embed", "mlp")),
        leaf("params", (64,), ("norm",)),
        *(leaf("optimizer", (64, 128), ("embed", "mlp")) for _ in range(2)),
        *(leaf("optimizer", (64,), ("norm",)) for _ in range(2)),
        leaf("other", (), (), itemsize=STEP_BYTES),
    ),
    axis_rules={"embed": "fsdp", "mlp": "tensor", "norm": "none"},
    flops_per_row=1.0,
    activation_bytes_per_row={"none": 1000, "dots": 500, "full": 101},
    activation_tensor_fraction=0.5,
    tensor_reduce_bytes_per_row=0.0,
    remat_flops_factor={"none": 1.0, "dots": 1.1, "full": 1.3},
)


def mesh(dcn_data: int = 1, dcn_fsdp: int = 1, ici_fsdp: int = 1, ici_tensor: int = 1) -> MeshShape:
    return MeshShape(dcn_data=dcn_data, dcn_fsdp=dcn_fsdp, ici_fsdp=ici_fsdp, ici_tensor=ici_tensor)


def test_one_device_holds_everything() -> None:
    memory = estimate_memory(FOOTPRINT, mesh(), 3, "none", None)
    assert memory.params_bytes == memory.gradients_bytes == W_BYTES + SCALE_BYTES
    assert memory.optimizer_bytes == 2 * (W_BYTES + SCALE_BYTES) + STEP_BYTES
    assert memory.activations_bytes == 3 * 1000
    assert memory.total_bytes == 4 * (W_BYTES + SCALE_BYTES) + STEP_BYTES + 3000
    assert memory.fits


@pytest.mark.parametrize(
    ("on", "shards"),
    [
        (mesh(dcn_data=2), 1),
        (mesh(ici_fsdp=8), 8),
        (mesh(dcn_fsdp=2), 2),
        (mesh(dcn_fsdp=2, ici_fsdp=8), 16),
        (mesh(dcn_fsdp=2, ici_fsdp=2, ici_tensor=4), 16),
    ],
)
def test_state_and_gradients_are_divided_by_the_axes_that_shard_them(on: MeshShape, shards: int) -> None:
    memory = estimate_memory(FOOTPRINT, on, 1, "none", None)
    assert memory.params_bytes == memory.gradients_bytes == W_BYTES // shards + SCALE_BYTES
    assert memory.optimizer_bytes == 2 * (W_BYTES // shards + SCALE_BYTES) + STEP_BYTES


@pytest.mark.parametrize(("remat", "kept"), [("none", 1000), ("dots", 500), ("full", 101)])
def test_rematerialization_decides_what_a_row_keeps(remat: Remat, kept: int) -> None:
    assert estimate_memory(FOOTPRINT, mesh(), 5, remat, None).activations_bytes == 5 * kept


def test_tensor_parallelism_divides_its_fraction_of_the_activations_and_rounds_up() -> None:
    assert estimate_memory(FOOTPRINT, mesh(ici_tensor=2), 2, "none", None).activations_bytes == 2 * 750
    assert estimate_memory(FOOTPRINT, mesh(ici_tensor=2), 2, "full", None).activations_bytes == 2 * 76  # of 75.75
    assert estimate_memory(FOOTPRINT, mesh(ici_fsdp=2), 2, "none", None).activations_bytes == 2 * 1000


def test_a_device_filled_to_the_last_byte_fits_and_one_byte_less_does_not() -> None:
    total = estimate_memory(FOOTPRINT, mesh(), 1, "none", None).total_bytes
    assert estimate_memory(FOOTPRINT, mesh(), 1, "none", total).fits
    assert not estimate_memory(FOOTPRINT, mesh(), 1, "none", total - 1).fits


def test_leaves_of_one_shape_are_counted_once_each_but_kinds_are_kept_apart() -> None:
    counts = {(one.kind, one.shape): count for one, count in distinct_leaves(FOOTPRINT.leaves)}
    assert counts == {
        ("params", (64, 128)): 1,
        ("params", (64,)): 1,
        ("optimizer", (64, 128)): 2,
        ("optimizer", (64,)): 2,
        ("other", ()): 1,
    }


def test_an_estimate_survives_json() -> None:
    memory = estimate_memory(FOOTPRINT, mesh(), 1, "none", 10)
    assert MemoryEstimate.model_validate_json(memory.model_dump_json()) == memory
