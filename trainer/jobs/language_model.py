"""A decoder-only language model over bytes, as Llama builds it: RoPE, RMSNorm, SwiGLU, grouped-query attention.

Shapes, written as suffixes of tensor names:

    B  rows of the batch        E  embed_dim                 N  num_heads
    T  seq_len                  M  mlp_dim                   K  num_kv_heads
    V  vocab_size               H  head_dim                  G  query heads per kv head (N / K)
    L  num_layers               C  the two parts of a fused kernel: key and value, or gate and up

Layers are one scanned body with stacked parameters, so that the compiled program (and the time to compile it,
which every restart pays) does not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.jobs.protocol import Batch, PyTree
from trainer.jobs.text_data import TextSource
from trainer.planning.footprint import AxisRule, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that make one model out of the family."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int = 256
    seq_len: int
    rope_theta: float = 10_000.0


# fmt: off
PRESETS: Mapping[str, Shape] = {
    "0.5m": Shape(num_layers=3, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=256, seq_len=48),
    "3m": Shape(num_layers=8, embed_dim=192, num_heads=6, num_kv_heads=2, head_dim=32, mlp_dim=512, seq_len=128),
    "25m": Shape(num_layers=16, embed_dim=384, num_heads=6, num_kv_heads=2, head_dim=64, mlp_dim=1024, seq_len=512),
    "125m": Shape(num_layers=20, embed_dim=768, num_heads=12, num_kv_heads=4, head_dim=64, mlp_dim=2048, seq_len=1024),
    # TinyLlama's shape.
    "1b": Shape(num_layers=22, embed_dim=2048, num_heads=32, num_kv_heads=4, head_dim=64, mlp_dim=5632, seq_len=2048),
    # Llama 3's shapes.
    "8b": Shape(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336,
                vocab_size=128_256, seq_len=8192, rope_theta=500_000.0),
    "70b": Shape(num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28672,
                 vocab_size=128_256, seq_len=8192, rope_theta=500_000.0),
}
# fmt: on


class LanguageModelParams(BaseModel):
    """A preset, and what to change of it. A shape field left at None comes from the preset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Literal["0.5m", "3m", "25m", "125m", "1b", "8b", "70b"] = "0.5m"
    """Named after the number of parameters."""
    num_layers: int | None = Field(default=None, ge=1, le=1000)
    """Transformer layers."""
    embed_dim: int | None = Field(default=None, ge=1, le=2**17)
    """Width of the residual stream."""
    num_heads: int | None = Field(default=None, ge=1, le=1024)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=1024)
    """Key and value heads; divides `num_heads`."""
    head_dim: int | None = Field(default=None, ge=2, le=1024, multiple_of=2)
    """Width of a head; even, because RoPE turns pairs. None: `embed_dim` / `num_heads` when one of them is given."""
    mlp_dim: int | None = Field(default=None, ge=1, le=2**19)
    """Width of the gated MLP."""
    vocab_size: int | None = Field(default=None, ge=256, le=2**20)
    """Tokens. The data are bytes, which use the first 256."""
    seq_len: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens that one row trains on; a sample is one byte longer."""
    rope_theta: float | None = Field(default=None, gt=1)
    """Base of the rotary wavelengths."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping a value of each residual branch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation. Parameters, attention weights and the loss are float32."""

    @property
    def shape(self) -> Shape:
        given = {f.name: v for f in dataclasses.fields(Shape) if (v := getattr(self, f.name)) is not None}
        if "head_dim" not in given and ("embed_dim" in given or "num_heads" in given):
            whole = dataclasses.replace(PRESETS[self.preset], **given)
            given["head_dim"] = whole.embed_dim // whole.num_heads
        return dataclasses.replace(PRESETS[self.preset], **given)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        shape = self.shape
        if self.head_dim is None and shape.embed_dim % shape.num_heads:
            raise ValueError(
                f"embed_dim ({shape.embed_dim}) is not divisible by num_heads ({shape.num_heads}); "
                "change one of them or set head_dim"
            )
        if shape.head_dim % 2:
            raise ValueError(
                f"head_dim ({shape.head_dim} = embed_dim {shape.embed_dim} / num_heads {shape.num_heads}) is odd; "
                "RoPE needs it even"
            )
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"num_heads ({shape.num_heads}) is not divisible by num_kv_heads ({shape.num_kv_heads})")
        return self


class LanguageModel:
    """The built-in `TrainingJob`. Its loss is nats per byte: the mean over the tokens of a row."""

    Params: ClassVar[type[BaseModel]] = LanguageModelParams
    axis_rules: Mapping[str, AxisRule] = {
        "vocab": "tensor",
        "mlp": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "embed": "fsdp",
        "head_dim": "none",
        "layers": "none",
        # Key and value (gate and up) stay together, so that slicing them apart needs no communication.
        "parts": "none",
        # Too small to be worth gathering.
        "norm": "none",
    }

    def __init__(self, params: LanguageModelParams) -> None:
        self.params = params
        self.shape = params.shape
        self.tokens_per_row = self.shape.seq_len

    def init(self, key: jax.Array) -> PyTree:
        return jax.tree.map(lambda box: box.unbox(), self._init_boxed(key), is_leaf=_is_box)

    def logical_axes(self) -> PyTree:
        # The key is made inside eval_shape: a concrete one would open a backend.
        boxed = jax.eval_shape(lambda: self._init_boxed(jax.random.key(0)))
        return jax.tree.map(lambda box: tuple(box.names), boxed, is_leaf=_is_box)

    def logits(self, params: PyTree, tokens_BxT: jax.Array) -> jax.Array:
        """Float32 scores BxTxV of the token after each position, without dropout."""
        return self._apply(params, tokens_BxT, None, "none")

    def loss(
        self, params: PyTree, batch: Batch, weights: jax.Array, keys: jax.Array, *, remat: Remat
    ) -> tuple[jax.Array, jax.Array]:
        # A padding row's loss has to be finite whatever the row holds, because 0 * nan is nan.
        tokens_BxT1 = jnp.where(weights[:, None] > 0, batch["tokens"], 0)
        dropout_keys_B = keys if self.params.dropout > 0 else None
        logits_BxTxV = self._apply(params, tokens_BxT1[:, :-1], dropout_keys_B, remat)
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT1[:, 1:])
        return jnp.sum(weights * losses_BxT.mean(axis=1)), jnp.sum(weights)

    def for_evaluation(self) -> LanguageModel:
        """Without dropout."""
        return LanguageModel(self.params.model_copy(update={"dropout": 0.0}))

    def data(self, path: str | None) -> TextSource:
        return TextSource(path, seq_len=self.shape.seq_len)

    def flops_per_row(self) -> float:
        """PaLM (Chowdhery et al. 2022), appendix B: per token 6 for each matrix parameter, and 12 T N H per layer.

        The embedding is looked up, not multiplied. Attention counts its masked half, because it is computed.
        """
        s = self.shape
        attention_params = s.embed_dim * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
        matrix_params = s.num_layers * (attention_params + 3 * s.embed_dim * s.mlp_dim) + s.embed_dim * s.vocab_size
        attention = 12 * s.num_layers * s.seq_len * s.num_heads * s.head_dim
        return float(s.seq_len * (6 * matrix_params + attention))

    def activation_bytes_per_row(self) -> Mapping[Remat, int]:
        """Korthikanti et al. 2022, section 4, counted anew for what JAX keeps of this layer; c is the size of `dtype`.

        Per layer and token, `none` keeps the arrays of both norms (6 E float32, 2 E of c), query, key, value and
        attention output, six arrays of the MLP, the attention weights (N T, float32 and c) and the dropout masks.
        `dots` keeps the layer's input and the results of its matrix products, attention's own excepted; `full` keeps
        the input alone. On top comes the larger of the two passing needs: one layer being differentiated, or the head
        (logits and their gradient in float32, the final norm).
        """
        s = self.shape
        c = jnp.dtype(self.params.dtype).itemsize
        q, kv = s.num_heads * s.head_dim, 2 * s.num_kv_heads * s.head_dim
        masks = 2 * s.embed_dim if self.params.dropout > 0 else 0
        scores = s.num_heads * s.seq_len * (4 + c)
        layer = s.embed_dim * (24 + 2 * c) + c * (2 * q + kv + 6 * s.mlp_dim) + scores + masks
        kept: dict[Remat, int] = {
            "none": layer,
            "dots": c * (2 * s.embed_dim + q + kv + 2 * s.mlp_dim),
            "full": c * s.embed_dim,
        }
        passing = max(layer, 16 * s.embed_dim + 8 * s.vocab_size)
        return {remat: s.seq_len * (s.num_layers * per_token + passing) for remat, per_token in kept.items()}

    def _init_boxed(self, key: jax.Array) -> PyTree:
        # Flax makes parameters by running the model; on a single token, since only the parameters are wanted.
        return self._decoder("none").init(key, jnp.zeros((1, 1), jnp.int32), None)["params"]

    def _apply(self, params: PyTree, tokens_BxT: jax.Array, keys_B: jax.Array | None, remat: Remat) -> jax.Array:
        logits_BxTxV = self._decoder(remat).apply({"params": params}, tokens_BxT, keys_B)
        assert isinstance(logits_BxTxV, jax.Array)
        return logits_BxTxV

    def _decoder(self, remat: Remat) -> _Decoder:
        return _Decoder(self.shape, self.params.dropout, jnp.dtype(self.params.dtype), remat)


class _Layer(nn.Module):
    """One transformer layer: the body of the scan, so it returns `(carry, None)`."""

    shape: Shape
    dropout: float
    dtype: jnp.dtype[Any]

    @nn.compact
    def __call__(self, x_BxTxE: jax.Array, rotary: Rotary, keys_B: jax.Array | None) -> tuple[jax.Array, None]:
        s = self.shape
        # Each of the 2 * num_layers branches adds to the residual stream; together they start with its variance.
        branch_scale = (2 * s.num_layers) ** -0.5
        drop = _row_dropout(keys_B, self.dropout, x_BxTxE.shape[1:])

        y_BxTxE = _norm(self.dtype, "attention_norm")(x_BxTxE)
        q_BxTxNxH = _dense((s.num_heads, s.head_dim), ("embed", "heads", "head_dim"), self.dtype, "query")(y_BxTxE)
        kv_BxTxCxKxH = _dense(
            (2, s.num_kv_heads, s.head_dim), ("embed", "parts", "kv_heads", "head_dim"), self.dtype, "key_value"
        )(y_BxTxE)
        k_BxTxKxH, v_BxTxKxH = kv_BxTxCxKxH[:, :, 0], kv_BxTxCxKxH[:, :, 1]
        attended_BxTxNxH = jax.nn.dot_product_attention(
            _rotate(q_BxTxNxH, rotary), _rotate(k_BxTxKxH, rotary), v_BxTxKxH, is_causal=True
        )
        branch_BxTxE = _dense(
            s.embed_dim, ("heads", "head_dim", "embed"), self.dtype, "attention_out", scale=branch_scale, axis=(-2, -1)
        )(attended_BxTxNxH)
        x_BxTxE = _by_rows(x_BxTxE + drop(branch_BxTxE, 0))

        y_BxTxE = _norm(self.dtype, "mlp_norm")(x_BxTxE)
        gate_up_BxTxCxM = _dense((2, s.mlp_dim), ("embed", "parts", "mlp"), self.dtype, "gate_up")(y_BxTxE)
        hidden_BxTxM = nn.silu(gate_up_BxTxCxM[:, :, 0]) * gate_up_BxTxCxM[:, :, 1]
        branch_BxTxE = _dense(s.embed_dim, ("mlp", "embed"), self.dtype, "mlp_out", scale=branch_scale)(hidden_BxTxM)
        return _by_rows(x_BxTxE + drop(branch_BxTxE, 1)), None


class _Decoder(nn.Module):
    shape: Shape
    dropout: float
    dtype: jnp.dtype[Any]
    remat: Remat

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Float32 logits BxTxV; dropout only when there are keys."""
        s = self.shape
        x_BxTxE = nn.Embed(
            s.vocab_size,
            s.embed_dim,
            dtype=self.dtype,
            embedding_init=_named(nn.initializers.normal(1.0), ("vocab", "embed")),
            name="embedding",
        )(tokens_BxT)
        x_BxTxE = _by_rows(x_BxTxE)
        keys_LxB = None
        if keys_B is not None:
            keys_LxB = jax.vmap(lambda key: jax.random.split(key, s.num_layers), out_axes=1)(keys_B)
        layer = _Layer
        if self.remat != "none":
            # The scan already keeps XLA from undoing the recomputation.
            layer = nn.remat(_Layer, policy=_REMAT_POLICIES[self.remat], prevent_cse=False)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, 0),
            length=s.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(s, self.dropout, self.dtype, name="layers")  # a fixed name: remat must not change the parameter tree
        x_BxTxE, _ = layers(x_BxTxE, _rotary(tokens_BxT.shape[1], s.head_dim, s.rope_theta), keys_LxB)
        x_BxTxE = _norm(self.dtype, "final_norm")(x_BxTxE)
        logits_BxTxV = _dense(s.vocab_size, ("embed", "vocab"), self.dtype, "unembedding")(x_BxTxE)
        return logits_BxTxV.astype(jnp.float32)


_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

Rotary = tuple[jax.Array, jax.Array]  # cosines and sines, each Tx1x(H/2)


class _Named(nn.Partitioned[jax.Array]):
    """A parameter with the logical axes of its dims, and no more.

    Flax's own boxes also constrain the sharding wherever a mesh is set: they take logical names for mesh axes, and fail
    on the flattened kernels inside `DenseGeneral`.
    """

    def unbox(self, apply_constraint: bool = True) -> jax.Array:
        value: jax.Array = self.value
        return value


def _is_box(node: object) -> bool:
    return isinstance(node, _Named)


def _named(init: nn.initializers.Initializer, axes: tuple[str, ...]) -> Callable[..., _Named]:
    return lambda *args: _Named(init(*args), names=axes)


def _by_rows(x_BxTxE: jax.Array) -> jax.Array:
    """Keep the residual stream sharded over its rows, under a mesh and flax's `logical_axis_rules` for "batch".

    Left to itself the compiler may rather keep the shards of the weights in place, give every device all rows, and
    sum activations of the whole global batch. Without rules this does nothing.
    """
    sharded: jax.Array = with_logical_constraint(x_BxTxE, ("batch", None, None))
    return sharded


def _dense(
    features: int | tuple[int, ...],
    axes: tuple[str, ...],
    dtype: jnp.dtype[Any],
    name: str,
    *,
    scale: float = 1.0,
    axis: int | tuple[int, ...] = -1,
) -> nn.DenseGeneral:
    init = nn.initializers.variance_scaling(scale**2, "fan_in", "normal")
    return nn.DenseGeneral(
        features,
        axis=axis,
        use_bias=False,
        dtype=dtype,
        kernel_init=_named(init, axes),
        name=name,
    )


def _norm(dtype: jnp.dtype[Any], name: str) -> nn.RMSNorm:
    return nn.RMSNorm(dtype=dtype, scale_init=_named(nn.initializers.ones, ("norm",)), name=name)


def _rotary(num_positions: int, head_dim: int, theta: float) -> Rotary:
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x_BxTxNxH: jax.Array, rotary: Rotary) -> jax.Array:
    """Turn the pairs (i, i + H/2) of each head by the angle of its position."""
    cos, sin = rotary
    first, second = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxTxNxH.dtype)


def _row_dropout(
    keys_B: jax.Array | None, rate: float, row_shape: tuple[int, ...]
) -> Callable[[jax.Array, int], jax.Array]:
    """Dropout for the two branches of a layer. The masks of a row depend on its key alone, never on the batch."""
    if keys_B is None:
        return lambda branch, index: branch
    keep_Bx2xTxE = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, (2, *row_shape)))(keys_B)
    return lambda branch, index: jnp.where(keep_Bx2xTxE[:, index], branch / (1 - rate), 0)
