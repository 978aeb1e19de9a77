"""The example in `examples/quadratic.py` is a whole job, short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import quadratic
from trainer.errors import ConfigError
from trainer.jobs.protocol import DataSource, TrainingJob
from trainer.jobs.registry import make_job

EXAMPLE = "examples.quadratic:LinearRegression"


def test_the_example_has_at_most_40_lines() -> None:
    assert len(Path(quadratic.__file__).read_text().splitlines()) <= 40


def test_the_example_satisfies_both_protocols() -> None:
    job = make_job(EXAMPLE, {})
    assert isinstance(job, TrainingJob)
    assert isinstance(job.data(None), DataSource)
    jax.tree.map(
        lambda leaf, axes: np.testing.assert_equal(leaf.ndim, len(axes)),
        jax.eval_shape(job.init, jax.random.key(0)),
        job.logical_axes(),
    )


def test_the_example_beats_its_baseline_down_to_the_noise() -> None:
    job = make_job(EXAMPLE, {})
    source = job.data(None)
    baseline = source.baseline_loss()
    samples = [source[index] for index in range(256)]
    batch = {field: jnp.stack([sample[field] for sample in samples]) for field in samples[0]}
    weights, keys = jnp.ones(256), jax.random.split(jax.random.key(0), 256)

    @jax.jit
    def mean_loss(params: object) -> jax.Array:
        total, weight = job.loss(params, batch, weights, keys, remat="none")
        return total / weight

    params = job.init(jax.random.key(0))
    assert baseline is not None
    assert float(mean_loss(params)) == pytest.approx(baseline, rel=0.2)
    for _ in range(100):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(mean_loss)(params))
    assert float(mean_loss(params)) < 0.02


def test_rows_of_weight_zero_contribute_nothing() -> None:
    job = make_job(EXAMPLE, {"l2": 0.5})
    params = {"w": jnp.ones(8)}
    keys = jax.random.split(jax.random.key(0), 2)
    rows = {"x": jnp.ones((2, 8)), "y": jnp.array([3.0, 1e9])}
    total, weight = job.loss(params, rows, jnp.array([2.0, 0.0]), keys, remat="none")
    assert (float(total), float(weight)) == (2 * ((8 - 3) ** 2 + 0.5 * 8), 2)


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^job_params\.l2: .*\(given: -1\)$"):
        make_job(EXAMPLE, {"l2": -1})
