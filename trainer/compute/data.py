"""Which samples each step consumes, the rows of them that this process feeds, and the digest that proves it.

Data has no state. Sample `i` of the run is element `i` of an endless sequence: each epoch is its own seeded
permutation of the source. Step `s` (from 1) consumes samples `(s-1)*B … s*B-1`, whatever the topology.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.jobs.protocol import DataSource
from trainer.planning.topology import TopologyPlan

_PREFETCH_STEPS = 4

HostBatch = dict[str, Any]
"""`fields`: name -> microbatches x local rows x …; `weights` float32, `sample_ids` uint32, microbatches x rows."""


def sample_order(source: DataSource, seed: int) -> grain.MapDataset[Mapping[str, np.ndarray]]:
    """The run's endless sample sequence by random access."""
    dataset = grain.MapDataset.source(source)
    return dataset.shuffle(seed).repeat(reseed_each_epoch=True)


def local_rows(sharding: NamedSharding, topology: TopologyPlan) -> slice:
    """The rows of each microbatch that this process's devices hold; contiguous, because processes own mesh blocks."""
    shape = (topology.num_microbatches, topology.rows_per_microbatch)
    slices = [index[1] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    starts = [rows.indices(topology.rows_per_microbatch)[0] for rows in slices]
    stops = [rows.indices(topology.rows_per_microbatch)[1] for rows in slices]
    return slice(min(starts), max(stops))


def load_batch(
    dataset: grain.MapDataset[Mapping[str, np.ndarray]], step: int, topology: TopologyPlan, rows: slice
) -> HostBatch:
    """The local rows of step `step` (from 1). Padding rows repeat the step's first sample with weight 0."""
    batch_size = topology.global_batch_size
    first = (step - 1) * batch_size
    shape = (topology.num_microbatches, rows.stop - rows.start)
    position = (
        np.arange(topology.num_microbatches)[:, None] * topology.rows_per_microbatch
        + np.arange(rows.start, rows.stop)[None, :]
    )
    real = position < batch_size
    samples = first + np.where(real, position, 0)
    loaded = [dataset[int(sample)] for sample in samples.flat]
    return {
        "fields": {
            name: np.stack([sample[name] for sample in loaded]).reshape(*shape, *np.shape(loaded[0][name]))
            for name in loaded[0]
        },
        "weights": real.astype(np.float32),
        "sample_ids": samples.astype(np.uint32),
    }


def batches(
    source: DataSource, seed: int, topology: TopologyPlan, rows: slice, start_step: int, steps: int
) -> Iterator[HostBatch]:
    """Host batches of steps `start_step + 1 … steps`, loaded ahead in threads."""
    dataset = sample_order(source, seed)
    ahead: Any = grain.MapDataset.range(start_step + 1, steps + 1).map(
        lambda step: load_batch(dataset, int(step), topology, rows)
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH_STEPS)
    return iter(ahead.to_iter_dataset(options))


def to_devices(batch: HostBatch, sharding: NamedSharding, topology: TopologyPlan) -> dict[str, Any]:
    """Global arrays of microbatches x rows x …, of which this process provides its rows."""
    leading = (topology.num_microbatches, topology.rows_per_microbatch)

    def place(local: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.make_array_from_process_local_data(sharding, local, (*leading, *local.shape[2:]))
        return placed

    arrays: dict[str, Any] = jax.tree.map(place, batch)
    return arrays


# --- digest --------------------------------------------------------------------------------------------------------

# Two hash functions of the family fmix32 (MurmurHash3's finalizer, A. Appleby, public domain): 64 bits together.
_STREAMS = (0x9E3779B1, 0x85EBCA77)


def row_hashes(xp: Any, fields: Mapping[str, Any]) -> Any:
    """Two uint32 hashes per row, rows x 2. `xp` is numpy or jax.numpy; both give the same bits.

    Every element counts with its position and its field's; floats count by their bit pattern.
    """
    columns = []
    for name in sorted(fields):
        values = fields[name]
        flat = values.reshape(values.shape[0], -1)
        if flat.dtype.itemsize == 4:
            columns.append(flat.view(xp.uint32))
        elif xp.issubdtype(flat.dtype, xp.floating):
            columns.append(flat.astype(xp.float32).view(xp.uint32))
        else:
            columns.append(flat.astype(xp.uint32))
    words = xp.concatenate(columns, axis=1)
    positions = xp.arange(1, words.shape[1] + 1, dtype=xp.uint32)
    streams = []
    for constant in _STREAMS:
        mixed = _fmix32(xp, words + positions * xp.uint32(constant))
        streams.append(_fmix32(xp, xp.sum(mixed, axis=1, dtype=xp.uint32)))
    return xp.stack(streams, axis=1)


def _fmix32(xp: Any, h: Any) -> Any:
    h = h ^ (h >> xp.uint32(16))
    h = h * xp.uint32(0x85EBCA6B)
    h = h ^ (h >> xp.uint32(13))
    h = h * xp.uint32(0xC2B2AE35)
    return h ^ (h >> xp.uint32(16))


def digest_text(sums: np.ndarray) -> str:
    """Sixteen hex digits of the two uint32 sums over a step's rows."""
    return f"{int(sums[0]):08x}{int(sums[1]):08x}"


def expected_digest(source: DataSource, seed: int, step: int, global_batch_size: int) -> str:
    """The digest of a step recomputed from the data alone, without devices."""
    dataset = sample_order(source, seed)
    first = (step - 1) * global_batch_size
    samples = [dataset[index] for index in range(first, first + global_batch_size)]
    fields = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    return digest_text(np.asarray(np.sum(row_hashes(np, fields), axis=0, dtype=np.uint32)))
