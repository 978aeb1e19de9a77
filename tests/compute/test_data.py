"""Which samples a step consumes, and the digest that proves it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.compute.data import (
    batches,
    digest_text,
    expected_digest,
    load_batch,
    local_rows,
    row_hashes,
    sample_order,
    to_devices,
)
from trainer.compute.mesh import batch_sharding, build_mesh
from trainer.config import parse_config
from trainer.planning.capacity import Capacity
from trainer.planning.footprint import Footprint
from trainer.planning.topology import TopologyPlan, plan_topology


class Numbers:
    """A source whose sample `i` says `i`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]:
        return {"tokens": np.array([index, index * 7 + 1], np.int32), "weight": np.float32(index) / 3}

    def content_hash(self) -> str:
        return "numbers"

    def baseline_loss(self) -> None:
        return None


FOOTPRINT = Footprint(
    leaves=(),
    axis_rules={},
    flops_per_row=1e6,
    activation_bytes_per_row={"none": 100, "dots": 50, "full": 10},
    activation_tensor_fraction=0.0,
    tensor_reduce_bytes_per_row=0.0,
    remat_flops_factor={"none": 1.0, "dots": 1.1, "full": 4 / 3},
)


def topology(num_devices: int, batch: int) -> TopologyPlan:
    """One process with all the devices, so that a whole batch is built in this one."""
    config = parse_config(
        {
            "run_name": "data",
            "steps": 10,
            "global_batch_size": batch,
            "num_hosts": {"max": 1},
            "engine": {"devices_per_host": num_devices},
        }
    )
    capacity = Capacity.uniform(1, devices_per_host=num_devices, hosts_per_slice=1)
    plan = plan_topology(config, capacity, FOOTPRINT)
    assert isinstance(plan, TopologyPlan)
    return plan


rows_of_words = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=width, max_size=width), min_size=1)
)


@settings(deadline=None, max_examples=200)
@given(rows_of_words)
def test_numpy_and_jax_hash_rows_to_the_same_bits(rows: list[list[int]]) -> None:
    fields = {"a": np.array(rows, np.int32), "b": np.array(rows, np.int32).astype(np.float32)}
    on_device = row_hashes(jnp, {name: jnp.asarray(values) for name, values in fields.items()})
    np.testing.assert_array_equal(row_hashes(np, fields), np.asarray(on_device))


@given(rows_of_words, st.data())
def test_the_digest_of_a_step_ignores_the_order_of_rows_and_notices_any_change(
    rows: list[list[int]], data: st.DataObject
) -> None:
    def digest(values: np.ndarray) -> str:
        return digest_text(np.asarray(np.sum(row_hashes(np, {"x": values}), axis=0, dtype=np.uint32)))

    values = np.array(rows, np.int32)
    assert digest(values[data.draw(st.permutations(range(len(rows))))]) == digest(values)
    changed = values.copy()
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, values.shape[1] - 1))
    changed[row, column] ^= 1 << data.draw(st.integers(0, 30))
    assert digest(changed) != digest(values)
    assert digest(np.concatenate([values, values[:1]])) != digest(values), "a row consumed twice shows"


@pytest.mark.parametrize(("num_devices", "batch"), [(1, 16), (2, 5), (6, 16), (8, 16), (8, 3)])
def test_every_topology_feeds_each_sample_of_a_step_once_and_only_padding_besides(num_devices: int, batch: int) -> None:
    plan = topology(num_devices, batch)
    mesh = build_mesh(plan)
    sharding = batch_sharding(mesh)
    source = Numbers(50)
    loaded = load_batch(sample_order(source, 3), 4, plan, local_rows(sharding, plan))
    real = loaded["weights"] > 0
    assert sorted(loaded["sample_ids"][real]) == list(range(3 * batch, 4 * batch))
    assert real.size - real.sum() == plan.padding_rows
    placed = to_devices(loaded, sharding, plan)
    assert placed["fields"]["tokens"].shape == (plan.num_microbatches, plan.rows_per_microbatch, 2)
    fed = jnp.where(placed["weights"].reshape(-1, 1) > 0, row_hashes(jnp, flat_fields(placed)), 0)
    digest = digest_text(np.asarray(jnp.sum(fed, axis=0, dtype=jnp.uint32)))
    assert digest == expected_digest(source, 3, 4, batch)


def flat_fields(placed: dict[str, dict[str, jax.Array]]) -> dict[str, jax.Array]:
    return {name: values.reshape(-1, *values.shape[2:]) for name, values in placed["fields"].items()}


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    order = sample_order(Numbers(20), 7)
    epochs = [[int(order[epoch * 20 + index]["tokens"][0]) for index in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [int(sample_order(Numbers(20), 8)[index]["tokens"][0]) for index in range(20)]


def test_batches_loaded_ahead_are_those_of_each_step_from_the_start_step_on() -> None:
    plan = topology(2, 4)
    rows = local_rows(batch_sharding(build_mesh(plan)), plan)
    source = Numbers(10)
    ahead = list(batches(source, 1, plan, rows, start_step=3, steps=6))
    assert len(ahead) == 3
    for step, batch in zip((4, 5, 6), ahead, strict=True):
        expected = load_batch(sample_order(source, 1), step, plan, rows)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
