"""Everything of one incarnation that is built from its plan before the first step: mesh, shardings, the jitted step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding

from trainer.compute.data import HostBatch
from trainer.compute.mesh import batch_sharding, build_mesh, per_device_sharding, replicated, state_shardings
from trainer.compute.train_state import (
    abstract_train_state,
    init_train_state,
    learning_rate_schedule,
    make_optimizer,
    state_axes,
)
from trainer.compute.train_step import make_train_step
from trainer.config import RunConfig
from trainer.jobs.protocol import TrainingJob
from trainer.planning.topology import BATCH_AXES, TopologyPlan

PyTree = Any


@dataclass(frozen=True)
class Program:
    job: TrainingJob
    optimizer: optax.GradientTransformation
    config: RunConfig
    topology: TopologyPlan
    mesh: Mesh
    abstract_state: PyTree
    """`jax.ShapeDtypeStruct` with the sharding of each leaf."""
    batch_sharding: NamedSharding

    @classmethod
    def build(cls, job: TrainingJob, config: RunConfig, topology: TopologyPlan) -> Program:
        mesh = build_mesh(topology)
        optimizer = make_optimizer(config.optimizer)
        shapes = abstract_train_state(job, optimizer)
        shardings = state_shardings(mesh, shapes, state_axes(job, optimizer, shapes), dict(job.axis_rules))
        abstract_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        return cls(job, optimizer, config, topology, mesh, abstract_state, batch_sharding(mesh))

    @property
    def state_shardings(self) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def init(self) -> PyTree:
        """The state of step 0, made where it lies."""
        make = jax.jit(
            lambda: init_train_state(self.job, self.optimizer, self.config.seed), out_shardings=self.state_shardings
        )
        return jax.block_until_ready(make())

    def lower(self, sample: HostBatch) -> jax.stages.Lowered:
        """Trace and lower the step for batches shaped like `sample` (this process's part of one)."""
        leading = (self.topology.num_microbatches, self.topology.rows_per_microbatch)
        batch = jax.tree.map(
            lambda local: jax.ShapeDtypeStruct((*leading, *local.shape[2:]), local.dtype, sharding=self.batch_sharding),
            sample,
        )
        votes = jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32, sharding=per_device_sharding(self.mesh))
        train_step = make_train_step(
            self.job,
            self.optimizer,
            learning_rate_schedule(self.config.optimizer),
            seed=self.config.seed,
            remat=self.topology.remat,
            param_shardings=self.state_shardings["params"],
        )
        jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(self.state_shardings, replicated(self.mesh)))
        # Inside, a job's logical axis names of activations mean this mesh: rows stay where the batch lies, so that XLA
        # gathers the weights of a layer and never the rows of the whole batch.
        with jax.set_mesh(self.mesh), nn.logical_axis_rules([("batch", BATCH_AXES)]):
            return jitted.lower(self.abstract_state, batch, votes)

    def votes(self, vote: int) -> jax.Array:
        """This process's vote on each of its devices."""
        return self._votes[vote]

    @cached_property
    def _votes(self) -> tuple[jax.Array, jax.Array]:
        # Both values are placed once, so that a vote costs no transfer per step.
        sharding = per_device_sharding(self.mesh)
        own = len(sharding.addressable_devices)
        no, yes = (
            jax.make_array_from_process_local_data(sharding, np.full(own, value, np.int32), (self.mesh.size,))
            for value in (0, 1)
        )
        return no, yes
