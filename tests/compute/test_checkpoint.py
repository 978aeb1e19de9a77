"""The worker's side of a checkpoint, on 8 devices of one process; whole groups are in tests/multiprocess."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import wire
from trainer.compute.checkpoint import Checkpointer, restore
from trainer.config import CheckpointConfig
from trainer.store import checkpoint_path

_COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))


@pytest.fixture
def state(mesh: Mesh) -> dict[str, jax.Array]:
    def place(array: np.ndarray, *axes: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    # Shapes that nothing else in the session uses: a program that is compiled already would hide a compile.
    numbers = np.random.default_rng(0)
    return {
        "step": place(np.int32(7)),
        "sharded": place(numbers.normal(size=(24, 52)).astype(np.float32), None, "fsdp"),
        "replicated": place(numbers.normal(size=(44, 12)).astype(np.float32)),
    }


@pytest.fixture
def compiled() -> Any:
    """Names of compile events, as they come in."""
    seen: list[str] = []

    def listen(event: str, _seconds: float, **_: Any) -> None:
        if event == _COMPILE:
            seen.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield seen
    monitoring.unregister_event_duration_listener(listen)


def test_a_save_compiles_nothing_and_comes_back_to_the_bit(
    tmp_path: Path, state: dict[str, jax.Array], compiled: list[str]
) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    checkpointer = Checkpointer(
        CheckpointConfig(), run_directory=tmp_path, incarnation=1, timeout_seconds=60, report=told.put
    )
    compiled.clear()

    checkpointer.save(7, state)
    checkpointer.wait()

    assert compiled == []
    assert isinstance(told.get(timeout=1), wire.Saving)
    assert isinstance(told.get(timeout=1), wire.Saved)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    again = restore(tmp_path / checkpoint_path(1, 7), abstract)
    for key, leaf in state.items():
        assert again[key].sharding == leaf.sharding
        np.testing.assert_array_equal(np.asarray(again[key]), np.asarray(leaf))
