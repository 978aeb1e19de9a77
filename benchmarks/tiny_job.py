"""What `benchmarks.orchestration` trains: a step of no weight, so that what is around it shows."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel

ROW_SECONDS_VARIABLE = "SHOAL_BENCHMARK_ROW_SECONDS"
"""Seconds that each row takes to load; reaches the workers through the environment."""
_WIDTH = 16


class Points:
    def __init__(self) -> None:
        self._row_seconds = float(os.environ.get(ROW_SECONDS_VARIABLE, "0"))

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(self._row_seconds)
        x = np.random.default_rng(index).normal(size=_WIDTH).astype(np.float32)
        return {"x": x, "y": np.float32(np.sin(x).sum())}

    def content_hash(self):
        return "points-1"

    def baseline_loss(self):
        return None


class Linear:
    """One layer. Claims more arithmetic than it does, so that the planner finds more hosts faster."""

    class Params(BaseModel, frozen=True, extra="forbid"):
        pass

    tokens_per_row = 1
    axis_rules = {"features": "fsdp"}  # noqa: RUF012

    def __init__(self, params):
        pass

    def init(self, key):
        return {"weight": jax.random.normal(key, (_WIDTH,))}

    def logical_axes(self):
        return {"weight": ("features",)}

    def data(self, path):
        return Points()

    def flops_per_row(self):
        return 1e8

    def activation_bytes_per_row(self):
        return {"none": 64, "dots": 64, "full": 64}

    def loss(self, params, batch, weights, keys, *, remat):
        return jnp.sum(weights * (batch["x"] @ params["weight"] - batch["y"]) ** 2), jnp.sum(weights)
