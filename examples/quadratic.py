"""A whole job of your own: `job: examples.quadratic:LinearRegression`. It finds the line behind noisy points."""

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field


class Points:
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        x = random.normal(size=8).astype(np.float32)
        return {"x": x, "y": np.float32(x @ np.arange(8) + random.normal(scale=0.1))}

    def content_hash(self):
        return "points-1"

    def baseline_loss(self):
        return 140.0  # the variance of y: what always answering 0 costs


class LinearRegression:
    class Params(BaseModel, frozen=True, extra="forbid"):
        l2: float = Field(default=0.0, ge=0)

    tokens_per_row, axis_rules = 1, {}

    # fmt: off
    def __init__(self, params): self.l2 = params.l2
    def init(self, key): return {"w": jnp.zeros(8)}
    def logical_axes(self): return {"w": ("features",)}
    def data(self, path): return Points()
    def flops_per_row(self): return 6.0 * 8
    def activation_bytes_per_row(self): return {"none": 64, "dots": 64, "full": 64}

    def loss(self, params, batch, weights, keys, *, remat):
        errors = (batch["x"] @ params["w"] - batch["y"]) ** 2 + self.l2 * jnp.sum(params["w"] ** 2)
        return jnp.sum(weights * errors), jnp.sum(weights)
