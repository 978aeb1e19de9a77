"""Evaluate the state of one checkpoint, in one process on one device.

    python -P -m trainer.compute.evaluate < request.json

Prints a `Measurement` and exits 0, or a `JobFailure` and exits 3. Reads only.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.compute.checkpoint import restore
from trainer.compute.data import load_batch, local_rows, sample_order, to_devices
from trainer.compute.program import Program
from trainer.compute.train_state import abstract_train_state, footprint_of, make_optimizer, state_axes
from trainer.config import EngineConfig, NumHostsConfig, ParallelismConfig, RunConfig
from trainer.description import JobFailure
from trainer.errors import DataError, StorageError
from trainer.evaluation import EvaluationRequest, Measurement, evaluation_steps
from trainer.jobs.protocol import DataSource, Evaluable, TrainingJob
from trainer.jobs.registry import make_job
from trainer.planning.capacity import Capacity
from trainer.planning.topology import BATCH_AXES, TopologyPlan, plan_topology

PyTree = Any


def evaluate(request: EvaluationRequest) -> Measurement:
    """Raises what the job raises, and as `trainer.evaluation.measure`."""
    config = request.config
    job = make_job(config.job, config.job_params)
    if isinstance(job, Evaluable):
        job = job.for_evaluation()
    source = job.data(config.data.path)
    steps, held_out = choose_steps(request, source)
    topology = one_device(config, job)
    program = Program.build(job, config, topology)
    params = restore_params(Path(request.checkpoint), program)
    order, rows = sample_order(source, config.seed), local_rows(program.batch_sharding, topology)
    sums = make_sums(program)
    losses, weights = [], []
    for step in steps:
        batch = to_devices(load_batch(order, step, topology, rows), program.batch_sharding, topology)
        loss, weight = jax.device_get(sums(params, batch))
        losses.append(float(loss))
        weights.append(float(weight))
    samples = len(steps) * config.global_batch_size
    return Measurement(
        loss=sum(losses) / math.fsum(weights),  # not fsum: an infinite loss is a result too
        samples=samples,
        tokens=samples * job.tokens_per_row,
        data=str(source) if type(source).__str__ is not object.__str__ else type(source).__qualname__,
        held_out=held_out,
    )


def choose_steps(request: EvaluationRequest, source: DataSource) -> tuple[range, bool | None]:
    """See `evaluation_steps`. Of other data, the first steps of the order that the run's seed gives them.

    Raises:
        DataError: not one whole batch of other data, or the run's own data have changed.
    """
    batch_size = request.config.global_batch_size
    if request.own_data_hash is None:
        if len(source) < batch_size:
            raise DataError(
                f"the data ({source}) has {len(source)} samples, one batch needs {batch_size} (global_batch_size)"
            )
        return range(1, 1 + min(request.batches, len(source) // batch_size)), None
    if source.content_hash() != request.own_data_hash:
        raise DataError(
            f"the data ({source}) are no longer those that the run was begun with, so nobody knows which of them it "
            "has trained on; give the data to evaluate on"
        )
    return evaluation_steps(
        num_samples=len(source),
        global_batch_size=batch_size,
        trained_steps=request.trained_steps,
        batches=request.batches,
    )


def one_device(config: RunConfig, job: TrainingJob) -> TopologyPlan:
    """The run's batch on one host with one device, whatever the run itself is trained on."""
    optimizer = make_optimizer(config.optimizer)
    state = abstract_train_state(job, optimizer)
    small = config.model_copy(
        update={
            "num_hosts": NumHostsConfig(min=1, max=1),
            "engine": EngineConfig(devices_per_host=1),
            "parallelism": ParallelismConfig(),
        }
    )
    capacity = Capacity.uniform(1, devices_per_host=1, hosts_per_slice=1)
    plan = plan_topology(small, capacity, footprint_of(job, state, state_axes(job, optimizer, state)))
    assert isinstance(plan, TopologyPlan), "one device without a memory limit can do anything"
    return plan


def restore_params(checkpoint: Path, program: Program) -> PyTree:
    """The parameters alone: the optimizer's state would triple what is read.

    Raises:
        StorageError: they are not there, or of other shapes.
    """
    try:
        return restore(checkpoint, {"params": program.abstract_state["params"]}, partial=True)["params"]
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(f"{checkpoint} cannot be restored: {' '.join(str(error).split())[:500]}") from error


def make_sums(program: Program) -> Any:
    """Returns `sums(params, batch) -> (sum of weight * loss, sum of weight)` over a whole batch, jitted."""
    job, seed, remat = program.job, program.config.seed, program.topology.remat

    def sums(params: PyTree, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        # Streams 0 and 1 of the seed make parameters and train.
        stream = jax.random.fold_in(jax.random.key(seed), 2)

        def microbatch(so_far: tuple[jax.Array, jax.Array], rows: dict[str, Any]) -> tuple[Any, None]:
            keys = jax.vmap(lambda sample: jax.random.fold_in(stream, sample))(rows["sample_ids"])
            loss, weight = job.loss(params, rows["fields"], rows["weights"], keys, remat=remat)
            return (so_far[0] + loss, so_far[1] + weight), None

        zero = jnp.zeros((), jnp.float32)
        result: tuple[jax.Array, jax.Array] = jax.lax.scan(microbatch, (zero, zero), batch)[0]
        return result

    jitted = jax.jit(sums)

    def on_the_mesh(params: PyTree, batch: dict[str, Any]) -> Any:
        with jax.set_mesh(program.mesh), nn.logical_axis_rules([("batch", BATCH_AXES)]):
            return jitted(params, batch)

    return on_the_mesh


def main() -> int:
    sys.path.append(os.getcwd())  # the user's own job module, after everything that is installed
    request = EvaluationRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        # A job may print; stdout carries the answer alone.
        with contextlib.redirect_stdout(sys.stderr):
            answer: Measurement | JobFailure = evaluate(request)
    except Exception as error:  # noqa: BLE001  see JobFailure.of
        answer = JobFailure.of(error, f"job {request.config.job!r} cannot be evaluated")
    print(answer.model_dump_json())
    return 0 if isinstance(answer, Measurement) else 3


if __name__ == "__main__":
    sys.exit(main())
