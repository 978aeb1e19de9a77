"""One optimizer step as one jitted function of the global batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.compute.data import row_hashes
from trainer.compute.train_state import TrainState
from trainer.jobs.protocol import TrainingJob
from trainer.planning.footprint import Remat

PyTree = Any


def make_train_step(
    job: TrainingJob,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    remat: Remat,
    param_shardings: PyTree,
) -> Any:
    """Returns `train_step(state, batch, votes) -> (state, metrics)`, to be jitted with the state donated.

    `batch` holds microbatches x rows arrays (see `trainer.compute.data`); `votes` is int32, one element per device,
    1 where its process wants to stop (see `trainer.compute.loop`). Metrics are replicated scalars, `digest` uint32[2].
    """

    def row_keys(step: jax.Array, sample_ids: jax.Array) -> jax.Array:
        step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
        return jax.vmap(lambda sample: jax.random.fold_in(step_key, sample))(sample_ids)

    def train_step(state: TrainState, batch: dict[str, Any], votes: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        params, step = state["params"], state["step"]

        def microbatch(sums: dict[str, Any], rows: dict[str, Any]) -> tuple[dict[str, Any], None]:
            keys = row_keys(step, rows["sample_ids"])
            (loss, weight), grads = jax.value_and_grad(job.loss, has_aux=True)(
                params, rows["fields"], rows["weights"], keys, remat=remat
            )
            # Summed over microbatches where they lie: a shard never grows beyond its parameter's.
            grads = jax.lax.with_sharding_constraint(grads, param_shardings)
            fed = (rows["weights"] > 0)[:, None]
            digest = jnp.sum(jnp.where(fed, row_hashes(jnp, rows["fields"]), 0), axis=0, dtype=jnp.uint32)
            one = {"grads": grads, "loss": loss, "weight": weight, "digest": digest, "samples": jnp.sum(fed)}
            return jax.tree.map(jnp.add, sums, one), None

        zeros = {
            "grads": jax.tree.map(jnp.zeros_like, params),
            "loss": jnp.zeros((), jnp.float32),
            "weight": jnp.zeros((), jnp.float32),
            "digest": jnp.zeros((2,), jnp.uint32),
            "samples": jnp.zeros((), jnp.int32),
        }
        if batch["weights"].shape[0] == 1:  # no loop in the program when there is nothing to loop over
            sums, _ = microbatch(zeros, jax.tree.map(lambda rows: rows[0], batch))
        else:
            sums, _ = jax.lax.scan(microbatch, zeros, batch)

        grads = jax.tree.map(lambda grad: grad / sums["weight"], sums["grads"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], params)
        metrics = {
            "loss": sums["loss"] / sums["weight"],
            "learning_rate": jnp.asarray(schedule(step), jnp.float32),
            "digest": sums["digest"],
            "samples": sums["samples"],
            "votes": jnp.sum(votes),
        }
        new_state = {"step": step + 1, "params": optax.apply_updates(params, updates), "optimizer": optimizer_state}
        return new_state, metrics

    return train_step
