"""The built-in job on tiny shapes; the world is 8 virtual CPU devices (see conftest)."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import ConfigError
from trainer.jobs.language_model import PRESETS, LanguageModel, LanguageModelParams, _rotary, _rotate, _row_dropout
from trainer.jobs.protocol import Evaluable, TrainingJob
from trainer.jobs.registry import make_job
from trainer.planning.footprint import REMAT_ORDER, Remat

ROWS = 8
TINY: dict[str, Any] = {
    "num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48, "seq_len": 12,
}  # fmt: skip

Grads = Any
Step = Callable[..., tuple[tuple[jax.Array, jax.Array], Grads]]


def tiny(**changes: Any) -> LanguageModel:
    return LanguageModel(LanguageModelParams(**TINY | changes))


@functools.cache
def params_of(job_params: LanguageModelParams) -> Any:
    return jax.jit(LanguageModel(job_params).init)(jax.random.key(3))


@functools.cache
def step_of(job_params: LanguageModelParams, remat: Remat = "none") -> Step:
    """Jitted `((sum, weight), gradient of the sum)`; cached and unoptimized, because these tests mostly compile."""
    job = LanguageModel(job_params)

    def loss(params: Any, tokens: Any, weights: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        return job.loss(params, {"tokens": tokens}, weights, keys, remat=remat)

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})


def param_shapes(job: TrainingJob) -> Any:
    return jax.eval_shape(job.init, jax.random.key(0))


def rows(count: int = ROWS, seq_len: int = TINY["seq_len"]) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """Tokens, weights and keys of `count` different rows."""
    random = np.random.default_rng(7)
    tokens = random.integers(0, 256, (count, seq_len + 1)).astype(np.int32)
    weights = random.uniform(0.5, 2.0, count).astype(np.float32)
    return tokens, weights, jax.random.split(jax.random.key(11), count)


def assert_close(left: Any, right: Any, rtol: float = 1e-5, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right)


def row_loss(job: LanguageModel, tokens: np.ndarray, keys: jax.Array, index: int) -> float:
    """The loss of one row inside a batch, picked out by its weight."""
    picked = np.zeros(len(tokens), np.float32)
    picked[index] = 1
    (total, weight), _ = step_of(job.params)(params_of(job.params), tokens, picked, keys)
    assert weight == 1
    return float(total)


def test_language_model_is_a_training_job() -> None:
    assert isinstance(tiny(), TrainingJob)


def test_an_untrained_model_is_about_as_good_as_guessing() -> None:
    job = tiny()
    (total, weight), _ = step_of(job.params)(params_of(job.params), *rows())
    assert abs(float(total / weight) - math.log(256)) < 0.8


def test_loss_and_gradients_do_not_depend_on_the_order_of_rows() -> None:
    job = tiny(dropout=0.2)
    tokens, weights, keys = rows()
    order = np.random.default_rng(1).permutation(ROWS)
    step = step_of(job.params)
    straight = step(params_of(job.params), tokens, weights, keys)
    assert_close(straight, step(params_of(job.params), tokens[order], weights[order], keys[order]))
    # The keys matter: the same rows with other keys are another step.
    (total, _), _ = step(params_of(job.params), tokens, weights, keys[order])
    assert abs(float(total - straight[0][0])) > 1e-3


def test_microbatches_add_up_to_the_whole_batch() -> None:
    job = tiny(dropout=0.2)
    batch = rows()
    step = step_of(job.params)
    whole = step(params_of(job.params), *batch)
    parts = [step(params_of(job.params), *(field[start : start + 4] for field in batch)) for start in (0, 4)]
    assert_close(whole, jax.tree.map(jnp.add, *parts))


@pytest.mark.parametrize("filler", [0, -1, 10**6], ids=["zeros", "negative", "out of vocabulary"])
def test_padding_rows_contribute_exactly_nothing(filler: int) -> None:
    job = tiny(dropout=0.2)
    tokens, weights, keys = rows()
    weights[4:] = 0
    padded = tokens.copy()
    padded[4:] = filler
    step = step_of(job.params)
    with_filler = step(params_of(job.params), padded, weights, keys)
    # Bit for bit, against other padding: nothing of a padding row reaches the sums.
    jax.tree.map(np.testing.assert_array_equal, with_filler, step(params_of(job.params), tokens, weights, keys))
    assert_close(with_filler, step(params_of(job.params), tokens[:4], weights[:4], keys[:4]))


def test_a_batch_of_padding_alone_gives_zero_and_not_nan() -> None:
    job = tiny(dropout=0.2)
    tokens, _, keys = rows()
    result = step_of(job.params)(params_of(job.params), tokens * 0, np.zeros(ROWS, np.float32), keys)
    jax.tree.map(lambda value: np.testing.assert_array_equal(value, np.zeros_like(value)), result)


def test_dropout_of_a_row_depends_on_its_key_alone() -> None:
    job = tiny(dropout=0.3)
    tokens, _, keys = rows()
    here = row_loss(job, tokens, keys, 2)
    moved = [5, 2, *(index for index in range(ROWS) if index not in (2, 5))]
    assert row_loss(job, tokens[moved], keys[np.array(moved)], 1) == pytest.approx(here, abs=1e-6)
    other_neighbours = np.where(np.arange(ROWS)[:, None] == 2, tokens, 65)
    assert row_loss(job, other_neighbours, keys, 2) == pytest.approx(here, abs=1e-6)
    other_key = keys.at[2].set(jax.random.key(99))
    assert abs(row_loss(job, tokens, other_key, 2) - here) > 1e-3


def test_without_dropout_the_keys_are_not_used() -> None:
    job = tiny()
    tokens, weights, keys = rows()
    step = step_of(job.params)
    (first, _), _ = step(params_of(job.params), tokens, weights, keys)
    (second, _), _ = step(params_of(job.params), tokens, weights, keys[::-1])
    assert first == second


def test_it_is_evaluated_without_dropout() -> None:
    job = tiny(dropout=0.3)
    assert isinstance(job, Evaluable)
    params, (tokens, weights, keys) = job.init(jax.random.key(0)), rows()

    def loss(of: TrainingJob) -> float:
        return float(of.loss(params, {"tokens": tokens}, weights, keys, remat="none")[0])

    assert loss(job.for_evaluation()) == loss(tiny())
    assert loss(job) != loss(tiny())


def test_dropout_drops_the_given_share_and_keeps_the_expected_value() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    branch = jnp.ones((4, 50, 40))
    drop = _row_dropout(keys, 0.2, branch.shape[1:])
    first, second = drop(branch, 0), drop(branch, 1)
    assert set(np.unique(first)) == {0.0, np.float32(1.25)}
    assert float(first.mean()) == pytest.approx(1, abs=0.03)
    assert not np.array_equal(first, second), "the two branches of a layer share a mask"
    assert not np.array_equal(first[0], first[1]), "two rows share a mask"


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialization_changes_neither_loss_nor_gradients(remat: Remat) -> None:
    job = tiny(dropout=0.2)
    batch = rows()
    params = params_of(job.params)
    assert_close(step_of(job.params)(params, *batch), step_of(job.params, remat)(params, *batch))


def test_a_stronger_policy_keeps_fewer_bytes_for_the_backward_pass() -> None:
    """Counted on what `jax.vjp` returns: the arrays that wait for the backward pass."""
    job = tiny(dropout=0.1)
    tokens, weights, keys = map(jnp.asarray, rows())

    def kept(remat: Remat) -> int:
        def backward(params: Any) -> Any:
            return jax.vjp(lambda p: job.loss(p, {"tokens": tokens}, weights, keys, remat=remat)[0], params)[1]

        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(backward, params_of(job.params)))
        )

    none, dots, full = map(kept, REMAT_ORDER)
    assert none > 1.5 * dots > 1.5 * 1.1 * full


def sharding_of(axes: tuple[str, ...], job: LanguageModel, mesh: Mesh) -> NamedSharding:
    axis_of_rule = {"fsdp": "fsdp", "tensor": "tensor", "none": None}
    return NamedSharding(mesh, PartitionSpec(*(axis_of_rule[job.axis_rules[name]] for name in axes)))  # type: ignore[no-untyped-call]  # jax


def shardings_of(job: LanguageModel, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda axes: sharding_of(axes, job, mesh), job.logical_axes(), is_leaf=lambda node: isinstance(node, tuple)
    )


@pytest.fixture
def mesh() -> Mesh:
    assert len(jax.devices()) == 8, "see conftest"
    # Auto: the compiler propagates shardings; under explicit axes the job would have to name them itself.
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.mark.parametrize("with_batch_rule", [False, True])
def test_a_step_on_a_4_by_2_mesh_equals_the_step_on_one_device(mesh: Mesh, with_batch_rule: bool) -> None:
    job = tiny(dropout=0.2)
    params, batch = params_of(job.params), rows()
    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))  # type: ignore[no-untyped-call]  # jax
    sharded_params = jax.device_put(params, shardings_of(job, mesh))
    assert not sharded_params["layers"]["gate_up"]["kernel"].sharding.is_fully_replicated
    arguments = (sharded_params, *jax.device_put(batch, by_row))
    with jax.set_mesh(mesh), nn.logical_axis_rules([("batch", "fsdp")] if with_batch_rule else []):
        # Traced anew: the cache of the other tests knows nothing of the rules.
        compiled = step_of.__wrapped__(job.params).lower(*arguments).compile()  # type: ignore[attr-defined]
    assert_close(step_of(job.params)(params, *batch), jax.device_get(compiled(*arguments)))
    if with_batch_rule:
        # Each device multiplies its own rows (2 of 8) with gathered weights, rather than all rows with its own shard.
        gate_up_of_all_rows = rf"f32\[{ROWS},{job.tokens_per_row},2,\d+\]"
        assert not re.search(gate_up_of_all_rows, compiled.as_text())


def test_initial_parameters_are_the_same_bits_on_any_mesh(mesh: Mesh) -> None:
    job = tiny()
    sharded = jax.jit(job.init, out_shardings=shardings_of(job, mesh))(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, params_of(job.params), jax.device_get(sharded))
    with jax.set_mesh(mesh):
        # Logical names are not mesh axes: flax must not take them for such.
        assert jax.tree.map(jnp.shape, param_shapes(job)) == jax.tree.map(jnp.shape, sharded)
    other = jax.jit(job.init)(jax.random.key(4))
    assert not np.array_equal(other["embedding"]["embedding"], params_of(job.params)["embedding"]["embedding"])


def test_layers_start_with_different_parameters() -> None:
    kernels = params_of(tiny().params)["layers"]["query"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])


def test_every_dim_of_every_parameter_has_a_logical_axis_with_a_rule() -> None:
    job = tiny()
    axes = job.logical_axes()

    def check(leaf: jax.Array, names: tuple[str, ...]) -> None:
        assert len(names) == leaf.ndim
        assert set(names) <= set(job.axis_rules)

    jax.tree.map(check, params_of(job.params), axes)
    assert axes["layers"]["query"]["kernel"] == ("layers", "embed", "heads", "head_dim")
    assert axes["embedding"]["embedding"] == ("vocab", "embed")


def test_a_later_token_does_not_change_earlier_logits() -> None:
    job = tiny()
    tokens = rows(2)[0][:, :-1]
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    logits = jax.jit(job.logits)
    before, after = logits(params_of(job.params), tokens), logits(params_of(job.params), changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert all(not np.allclose(before[:, position], after[:, position]) for position in range(7, 12))


def test_the_order_of_earlier_tokens_matters() -> None:
    """Without RoPE a single layer would be blind to it."""
    job = tiny(num_layers=1)
    tokens = rows(1)[0][:, :-1]
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    logits = jax.jit(job.logits)
    params = params_of(job.params)
    assert not np.allclose(logits(params, tokens)[:, -1], logits(params, swapped)[:, -1], atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 63), second=st.integers(0, 63), shift=st.integers(0, 64))
def test_rotary_attention_sees_distances_and_not_positions(first: int, second: int, shift: int) -> None:
    random = np.random.default_rng(5)
    query, key = (np.broadcast_to(random.normal(size=8), (1, 128, 1, 8)).astype(np.float32) for _ in range(2))
    rotary = _rotary(128, 8, 100.0)
    q_TxH, k_TxH = _rotate(jnp.asarray(query), rotary)[0, :, 0], _rotate(jnp.asarray(key), rotary)[0, :, 0]
    here = float(q_TxH[first] @ k_TxH[second])
    assert float(q_TxH[first + shift] @ k_TxH[second + shift]) == pytest.approx(here, abs=1e-4)
    assert float(jnp.linalg.norm(q_TxH[first])) == pytest.approx(float(np.linalg.norm(query[0, 0])), rel=1e-5)


def test_grouped_query_attention_equals_full_attention_with_repeated_heads() -> None:
    grouped, full = tiny(), tiny(num_kv_heads=4)
    params = params_of(grouped.params)
    kernel_LxExCxKxH = params["layers"]["key_value"]["kernel"]
    repeated = {"kernel": jnp.repeat(kernel_LxExCxKxH, 2, axis=3)}
    full_params = {**params, "layers": {**params["layers"], "key_value": repeated}}
    tokens = rows(2)[0][:, :-1]
    assert_close(jax.jit(grouped.logits)(params, tokens), jax.jit(full.logits)(full_params, tokens))


def test_bfloat16_is_for_the_computation_and_float32_for_parameters_and_loss() -> None:
    precise, fast = tiny(), tiny(dtype="bfloat16")
    tokens, weights, keys = map(jnp.asarray, rows())
    (expected, _), _ = step_of(precise.params)(params_of(precise.params), tokens, weights, keys)
    in_and_out = param_shapes(fast), jax.eval_shape(step_of(fast.params), param_shapes(fast), tokens, weights, keys)
    assert {leaf.dtype for leaf in jax.tree.leaves(in_and_out)} == {np.dtype("float32")}
    # The same key gives the same parameters, so that only the computation differs.
    total, _ = jax.jit(functools.partial(fast.loss, remat="none"))(
        params_of(precise.params), {"tokens": tokens}, weights, keys
    )
    assert float(total) == pytest.approx(float(expected), rel=0.02)
    assert total != expected


def test_the_model_learns_a_batch_by_heart() -> None:
    job = tiny()
    tokens, weights, keys = rows()
    step = step_of(job.params)
    optimizer = optax.adam(1e-2)
    params = params_of(job.params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(60):
        (total, weight), grads = step(params, tokens, weights, keys)
        updates, state = update(grads, state)
        params = optax.apply_updates(params, updates)
    assert float(total / weight) < 1.0


def test_the_compiled_program_does_not_grow_with_depth() -> None:
    def lines(num_layers: int) -> int:
        job = tiny(num_layers=num_layers)
        return len(step_of(job.params).lower(param_shapes(job), *rows()).as_text().splitlines())  # type: ignore[attr-defined]

    assert lines(2) == lines(6)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("0.5m", 0.5e6), ("3m", 3e6), ("25m", 25e6), ("125m", 125e6), ("1b", 1e9), ("8b", 8e9), ("70b", 70e9)],
)
def test_presets_have_about_as_many_parameters_as_their_names_say(preset: str, parameters: float) -> None:
    job = make_job("lm", {"preset": preset})
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(job))) == pytest.approx(
        parameters, rel=0.1
    )


def test_every_preset_is_accepted_and_only_those() -> None:
    for preset in PRESETS:
        assert LanguageModelParams(preset=preset).shape == PRESETS[preset]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^job_params\.preset: .*'0\.5m'.*\(given: \"9z\"\)$"):
        make_job("lm", {"preset": "9z"})


# One layer, because XLA's own count sees the body of the scan once; large enough that matrices outweigh the rest.
COUNTED: dict[str, Any] = {"num_layers": 1, "embed_dim": 128, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 384}


def test_flops_agree_with_the_count_of_the_compiler() -> None:
    job = LanguageModel(LanguageModelParams(**COUNTED, seq_len=96))
    batch = rows(2, 96)
    lowered = step_of(job.params).lower(param_shapes(job), *batch)  # type: ignore[attr-defined]
    assert 2 * job.flops_per_row() == pytest.approx(lowered.cost_analysis()["flops"], rel=0.15)


@pytest.mark.parametrize("remat", REMAT_ORDER)
def test_activation_bytes_agree_with_the_memory_of_the_compiled_step(remat: Remat) -> None:
    job = LanguageModel(LanguageModelParams(**COUNTED | {"num_layers": 6}, seq_len=96))
    compiled = step_of(job.params, remat).lower(param_shapes(job), *rows(16, 96)).compile()  # type: ignore[attr-defined]
    measured = compiled.memory_analysis().temp_size_in_bytes / 16
    assert job.activation_bytes_per_row()[remat] == pytest.approx(measured, rel=0.35)


def test_describing_the_largest_job_opens_no_backend() -> None:
    """The describe process runs beside the workers, which need the devices for themselves."""
    script = """
import jax
from trainer.jobs.registry import make_job
job = make_job("lm", {"preset": "70b"})
job.logical_axes(); job.flops_per_row(); job.activation_bytes_per_row()
jax.eval_shape(lambda: job.init(jax.random.key(0)))
assert not jax._src.xla_bridge._backends, jax._src.xla_bridge._backends
jax.devices()
assert jax._src.xla_bridge._backends, "the check would not have noticed"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"embed_dim": 130},
            "job_params: embed_dim (130) is not divisible by num_heads (4); change one of them or set head_dim",
        ),
        (
            {"num_heads": 3},
            "job_params: embed_dim (128) is not divisible by num_heads (3); change one of them or set head_dim",
        ),
        (
            {"embed_dim": 12, "num_heads": 4},
            "job_params: head_dim (3 = embed_dim 12 / num_heads 4) is odd; RoPE needs it even",
        ),
        ({"num_kv_heads": 3}, "job_params: num_heads (4) is not divisible by num_kv_heads (3)"),
        ({"head_dim": 7}, "job_params.head_dim: Input should be a multiple of 2 (given: 7)"),
        ({"dropout": 1}, "job_params.dropout: Input should be less than 1 (given: 1)"),
        ({"vocab_size": 100}, "job_params.vocab_size: Input should be greater than or equal to 256 (given: 100)"),
        ({"seq_length": 12}, "unknown key 'job_params.seq_length': did you mean 'job_params.seq_len'?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_params_that_do_not_fit_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_job("lm", given)
    assert str(refused.value) == message


sizes = st.none() | st.integers(1, 64)


@settings(max_examples=300, deadline=None)
@given(embed_dim=sizes, num_heads=sizes, num_kv_heads=sizes, head_dim=sizes)
def test_params_are_accepted_exactly_when_a_model_can_be_built(**given_sizes: int | None) -> None:
    try:
        shape = LanguageModelParams(**given_sizes).shape  # type: ignore[arg-type]
    except ValueError:
        whole = dataclasses.replace(PRESETS["0.5m"], **{k: v for k, v in given_sizes.items() if v is not None})
        head_dim = given_sizes["head_dim"] or whole.embed_dim / whole.num_heads
        assert head_dim % 2 or whole.num_heads % whole.num_kv_heads
    else:
        assert shape.num_heads % shape.num_kv_heads == 0
        assert shape.head_dim % 2 == 0
        assert all(getattr(shape, name) == value for name, value in given_sizes.items() if value is not None)
