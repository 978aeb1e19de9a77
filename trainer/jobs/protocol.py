"""What Shoal asks of the thing that is trained. Small on purpose: `examples/` implements it in 40 lines.

A job is a class made from its validated parameters. It is pure: parameters in, arrays out. Hosts, meshes,
checkpoints and batches are Shoal's business; a job that only uses what it is given trains the same on any
topology. In particular its randomness comes from the per-row `keys` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from pydantic import BaseModel

from trainer.planning.footprint import AxisRule, Remat

PyTree = Any
Batch = Mapping[str, jax.Array]  # field name -> rows x …


@runtime_checkable
class DataSource(Protocol):
    """Random access to samples. The sample of an index never changes while `content_hash` stays the same."""

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]:
        """One sample: each field an array of the same shape and dtype for every index."""
        ...

    def content_hash(self) -> str:
        """Hex digest of everything that samples are made from. Called once per run, not in workers."""
        ...

    def baseline_loss(self) -> float | None:
        """A loss that a trained model must beat, in the unit of `TrainingJob.loss`, or None.

        For text: the entropy of a unigram model.
        """
        ...


@runtime_checkable
class TrainingJob(Protocol):
    """Made as `Job(Job.Params(**job_params))`."""

    Params: ClassVar[type[BaseModel]]

    tokens_per_row: int
    """Tokens (or other units of work) that one sample trains on, for throughput figures."""

    axis_rules: Mapping[str, AxisRule]
    """How logical axes may be sharded; see `trainer.planning.footprint`."""

    def init(self, key: jax.Array) -> PyTree:
        """The initial parameters. Traced under jit with sharded outputs; must depend on `key` alone."""
        ...

    def logical_axes(self) -> PyTree:
        """The tree of `init` with, for each array, a tuple of logical axis names, one per dim."""
        ...

    def loss(
        self, params: PyTree, batch: Batch, weights: jax.Array, keys: jax.Array, *, remat: Remat
    ) -> tuple[jax.Array, jax.Array]:
        """Weighted sums over the rows: `(sum of weight * loss, sum of weight)`, float32 scalars.

        `weights` is float32 rows; rows of weight 0 are padding and must contribute exactly nothing. `keys` holds one
        PRNG key per row, a function of (seed, step, sample) alone: fold row randomness from it, nothing else.
        """
        ...

    def data(self, path: str | None) -> DataSource:
        """Open the data. Raises `trainer.errors.DataError` when it is missing or empty."""
        ...

    def flops_per_row(self) -> float:
        """Forward and backward work of one row."""
        ...

    def activation_bytes_per_row(self) -> Mapping[Remat, int]:
        """Peak bytes kept for the backward pass of one row, per rematerialization policy."""
        ...


@runtime_checkable
class Evaluable(Protocol):
    """What a job may offer besides, if it trains with something that it should not be judged with."""

    def for_evaluation(self) -> TrainingJob:
        """The same job as it is to be evaluated, such as without dropout. Its parameters have the same shapes."""
        ...
