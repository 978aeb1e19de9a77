"""What the runs of this folder train: two layers with dropout, small enough to compile in seconds on eight processes.

The harness copies this file next to the run, so that it is found as a user's own module is. What a test wants to go
wrong, it says through the environment, which reaches every worker and is no part of the run's settings.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel

WIDTH, HIDDEN = 16, 64
# Keeps steps from being over before a test can do anything about them: each row takes this long to load.
ROW_SECONDS = float(os.environ.get("SHOAL_TEST_ROW_SECONDS", "0"))
# While this file exists, no row is loaded and no step goes on.
PAUSE = os.environ.get("SHOAL_TEST_PAUSE", "")
# A file of `FIRST`, if given: while it exists, whatever the test put there goes wrong.
FAULT = os.environ.get("SHOAL_TEST_FAULT", "")


class Points:
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(ROW_SECONDS)
        while PAUSE and Path(PAUSE).exists():
            time.sleep(0.05)
        random = np.random.default_rng(index)
        x = random.normal(size=WIDTH).astype(np.float32)
        return {"x": x, "y": np.float32(np.sin(x).sum())}

    def content_hash(self):
        return "points-1"

    def baseline_loss(self):
        return None


class Mlp:
    class Params(BaseModel, frozen=True, extra="forbid"):
        dropout: float = 0.1

    tokens_per_row = 1
    axis_rules = {"features": "fsdp", "hidden": "tensor"}  # noqa: RUF012

    def __init__(self, params):
        self.dropout = params.dropout

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
            "out": jnp.ones(WIDTH),
        }

    def logical_axes(self):
        return {"up": ("features", "hidden"), "down": ("hidden", "features"), "out": ("features",)}

    def data(self, path):
        return Points()

    def flops_per_row(self):
        return 1e8  # claimed, so that the cost model finds more hosts faster, as it does for models worth training

    def activation_bytes_per_row(self):
        return {"none": 1024, "dots": 512, "full": 256}

    def loss(self, params, batch, weights, keys, *, remat):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.dropout, (HIDDEN,)))(keys)
        hidden = jnp.where(keep, hidden / (1 - self.dropout), 0)
        predicted = hidden @ params["down"] @ params["out"]
        return jnp.sum(weights * (predicted - batch["y"]) ** 2), jnp.sum(weights)


class LateDataError(Mlp):
    """Loads well until the file of the test says so, then every process raises as it loads its next row."""

    def data(self, path):
        class Breaking(Points):
            def __getitem__(self, index):
                if Path(FAULT).exists():
                    raise KeyError(f"row {index} has no label")
                return super().__getitem__(index)

        return Breaking()


class TracingError(Mlp):
    """One process alone fails while it traces the step; the others go on to a collective that never comes."""

    def loss(self, params, batch, weights, keys, *, remat):
        if jax.process_count() > 1 and jax.process_index() == int(FAULT):
            raise ZeroDivisionError("the learning rate was 0")
        return super().loss(params, batch, weights, keys, remat=remat)


class Suicide(Mlp):
    """Dies without a word as soon as it is made in a worker."""

    def loss(self, params, batch, weights, keys, *, remat):
        os.kill(os.getpid(), 9)
