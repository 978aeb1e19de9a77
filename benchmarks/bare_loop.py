"""One process of a training loop without Shoal: what its throughput is compared with.

    python -P -m benchmarks.bare_loop PARENT_PID SPEC_FILE PROCESS_INDEX RESULT_FILE

Model, data, batch, mesh, optimizer and input pipeline are the run's own. There is no agent, no controller, no vote, no
digest and no checkpoint. The spec says which step it runs: `plain`, as one would write it by hand, or `shoal`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trainer.config import RunConfig
from trainer.planning.topology import TopologyPlan
from trainer.processes import die_with_parent

StepKind = Literal["plain", "shoal"]
PyTree = Any
Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


class BareSpec(BaseModel):
    """What all processes of the loop are told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: RunConfig
    topology: TopologyPlan
    step: StepKind
    coordinator_address: str


class BareResult(BaseModel):
    """What each process writes down when it has finished."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_seconds: tuple[float, ...]
    """Of every step, from the end of the one before, as Shoal's metrics have it."""
    loss: float
    """Of the last step."""


def run(spec: BareSpec, process_index: int) -> BareResult:
    # Imported late: the benchmark itself takes the spec from this module and must not load jax.
    import jax

    from trainer.compute.data import batches, load_batch, local_rows, sample_order, to_devices
    from trainer.compute.program import Program
    from trainer.jobs.registry import make_job

    jax.distributed.initialize(
        coordinator_address=spec.coordinator_address,
        num_processes=spec.topology.num_processes,
        process_id=process_index,
        cluster_detection_method="deactivate",
    )
    config, topology = spec.config, spec.topology
    job = make_job(config.job, config.job_params)
    program = Program.build(job, config, topology)
    state = program.init()
    source = job.data(config.data.path)
    rows = local_rows(program.batch_sharding, topology)
    sample = load_batch(sample_order(source, config.seed), 1, topology, rows)
    step: Step
    if spec.step == "plain":
        step = compile_plain_step(program, sample)
    else:
        compiled, vote = program.lower(sample).compile(), program.votes(0)

        def step(state: PyTree, batch: PyTree) -> Any:
            return compiled(state, batch, vote)

    host_batches = batches(source, config.seed, topology, rows, 0, config.steps)
    return train(step, state, (to_devices(batch, program.batch_sharding, topology) for batch in host_batches))


def compile_plain_step(program: Any, sample: PyTree) -> Step:
    """`value_and_grad` and optax in one jitted function with the state donated; returns the loss."""
    import jax
    import optax
    from flax import linen as nn

    from trainer.compute.mesh import replicated
    from trainer.planning.topology import BATCH_AXES

    job, optimizer, topology = program.job, program.optimizer, program.topology
    assert topology.num_microbatches == 1, "the plain step has no microbatches"

    def plain_step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        fields, weights = (jax.tree.map(lambda rows: rows[0], batch[name]) for name in ("fields", "weights"))
        step_key = jax.random.fold_in(jax.random.key(program.config.seed), state["step"])
        row_keys = jax.random.split(step_key, topology.rows_per_microbatch)

        def mean_loss(params: PyTree) -> Any:
            total, weight = job.loss(params, fields, weights, row_keys, remat=topology.remat)
            return total / weight

        loss, grads = jax.value_and_grad(mean_loss)(state["params"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state}, loss

    leading = (topology.num_microbatches, topology.rows_per_microbatch)
    batch = jax.tree.map(
        lambda local: jax.ShapeDtypeStruct((*leading, *local.shape[2:]), local.dtype, sharding=program.batch_sharding),
        {"fields": sample["fields"], "weights": sample["weights"], "sample_ids": sample["sample_ids"]},
    )
    jitted = jax.jit(
        plain_step,
        donate_argnums=0,
        out_shardings=(program.state_shardings, replicated(program.mesh)),
    )
    with jax.set_mesh(program.mesh), nn.logical_axis_rules([("batch", BATCH_AXES)]):
        return jitted.lower(program.abstract_state, batch).compile()


def train(step: Step, state: PyTree, batches: Iterator[PyTree]) -> BareResult:
    """What a step returns is read while the next one runs, so that the devices never wait for Python."""
    import jax

    step_seconds: list[float] = []
    unread: PyTree = None
    last_end = time.monotonic()

    def read() -> Any:
        nonlocal last_end
        values = jax.device_get(unread)
        now = time.monotonic()
        step_seconds.append(now - last_end)
        last_end = now
        return values

    for batch in batches:
        state, metrics = step(state, batch)
        if unread is not None:
            read()
        unread = metrics
    values = read()
    return BareResult(
        step_seconds=tuple(step_seconds), loss=float(values["loss"] if isinstance(values, dict) else values)
    )


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    sys.path.append(os.getcwd())
    spec = BareSpec.model_validate_json(Path(sys.argv[2]).read_bytes())
    result = run(spec, int(sys.argv[3]))
    Path(sys.argv[4]).write_text(result.model_dump_json())
    import jax

    jax.distributed.shutdown()  # all leave together: the one that serves the coordinator must not go first


if __name__ == "__main__":
    main()
