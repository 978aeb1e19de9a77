"""The `train_state`: step, parameters and optimizer state as one tree, and what is known of it before it exists."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.config import OptimizerConfig
from trainer.jobs.protocol import TrainingJob
from trainer.planning.footprint import Footprint, LeafSpec, Remat

PyTree = Any
TrainState = dict[str, Any]  # {"step": int32 scalar, "params": …, "optimizer": …}


# Backward is two thirds of a step's work; `full` runs the forward third once more, `dots` little but element-wise work.
_REMAT_FLOPS_FACTOR: dict[Remat, float] = {"none": 1.0, "dots": 1.05, "full": 4 / 3}


@dataclass(frozen=True)
class LeafAxes:
    """Logical axis names of one array. A class of its own, because a tuple would count as a tree."""

    names: tuple[str | None, ...]


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up and cosine decay. A function of the step alone; `decay_steps` must be resolved."""
    assert config.decay_steps is not None
    # optax refuses a decay that ends within the warm-up; a run that short just warms up.
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.decay_steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    adamw = optax.adamw(learning_rate_schedule(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay)
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def init_train_state(job: TrainingJob, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Traced under jit with sharded outputs: values depend on the seed alone, not on the mesh."""
    # Stream 0 of the seed makes parameters; `train_step` folds stream 1 for the rows.
    params = job.init(jax.random.fold_in(jax.random.key(seed), 0))
    return {"step": jnp.zeros((), jnp.int32), "params": params, "optimizer": optimizer.init(params)}


def abstract_train_state(job: TrainingJob, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes, without opening a backend."""
    state: TrainState = jax.eval_shape(lambda: init_train_state(job, optimizer, 0))
    return state


def state_axes(job: TrainingJob, optimizer: optax.GradientTransformation, state: TrainState) -> PyTree:
    """`LeafAxes` for every leaf of the state: optimizer moments lie as their parameters do."""
    params_axes = jax.tree.map(
        lambda _, axes: LeafAxes(tuple(axes)), state["params"], job.logical_axes(), is_leaf=lambda x: x is None
    )
    return {
        "step": LeafAxes(()),
        "params": params_axes,
        "optimizer": optax.tree_utils.tree_map_params(
            # By shapes alone: the optimizer's own counters are arrays, and making one opens a backend.
            lambda placeholder: jax.eval_shape(optimizer.init, placeholder),
            lambda _, axes: axes,
            state["optimizer"],
            params_axes,
            transform_non_params=lambda leaf: LeafAxes((None,) * leaf.ndim),
        ),
    }


def footprint_of(job: TrainingJob, state: TrainState, axes: PyTree) -> Footprint:
    kinds = {"params": "params", "optimizer": "optimizer"}
    leaves = []
    for (path, leaf), leaf_axes in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(axes), strict=True):
        leaves.append(
            LeafSpec(
                path=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=leaf.shape,
                itemsize=leaf.dtype.itemsize,
                axes=leaf_axes.names,
                kind=kinds.get(path[0].key, "other"),  # type: ignore[arg-type]
            )
        )
    activations = dict(job.activation_bytes_per_row())
    tensor_parallel = "tensor" in job.axis_rules.values()
    return Footprint(
        leaves=tuple(leaves),
        axis_rules=dict(job.axis_rules),
        flops_per_row=job.flops_per_row(),
        activation_bytes_per_row=activations,
        # The residual stream is replicated over the tensor axis; heads and MLP, about half, are divided.
        activation_tensor_fraction=0.5 if tensor_parallel else 0.0,
        # Full rematerialization keeps one residual stream per layer; tensor parallelism all-reduces one of that size
        # four times per layer, twice forward and twice backward (Megatron-LM, arXiv:1909.08053, section 3).
        tensor_reduce_bytes_per_row=4.0 * activations["full"] if tensor_parallel else 0.0,
        remat_flops_factor=_REMAT_FLOPS_FACTOR,
    )


def fingerprint(job_name: str, params: dict[str, Any], footprint: Footprint) -> str:
    """Identifies what is trained: a state saved under another fingerprint must not be continued."""
    leaves = [(leaf.path, leaf.shape, leaf.itemsize) for leaf in footprint.leaves]
    text = json.dumps([job_name, params, leaves], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
