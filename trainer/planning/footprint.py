"""What a plan has to know of a job, as numbers. Emitted as JSON by `trainer.compute.describe`."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

# Rematerialization policies, weakest first: what the backward pass recomputes instead of keeping.
Remat = Literal["none", "dots", "full"]
REMAT_ORDER: tuple[Remat, ...] = ("none", "dots", "full")

# What a job's rule says of a logical axis: may be sharded over the fsdp mesh axes, over the tensor mesh axis, or never.
# A logical axis without a rule counts as "fsdp".
AxisRule = Literal["fsdp", "tensor", "none"]


class LeafSpec(BaseModel):
    """One array of the `train_state`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element."""
    axes: tuple[str | None, ...]
    """Logical axis of each dim; same length as `shape`."""
    kind: Literal["params", "optimizer", "other"]

    @model_validator(mode="after")
    def _one_axis_per_dim(self) -> Self:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.path}: {len(self.axes)} logical axes for {len(self.shape)} dims")
        return self

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Footprint(BaseModel):
    """Sizes and work of a job at its configured parameters, for one sample row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    leaves: tuple[LeafSpec, ...]
    axis_rules: dict[str, AxisRule]
    flops_per_row: float
    """Forward and backward pass of one row, without rematerialization."""
    activation_bytes_per_row: dict[Remat, int]
    """Peak bytes kept between forward and backward for one row, per rematerialization policy."""
    activation_tensor_fraction: float
    """Part of the activations, 0 to 1, that tensor parallelism divides."""
    tensor_reduce_bytes_per_row: float
    """Bytes per row that tensor parallelism all-reduces over a step."""
    remat_flops_factor: dict[Remat, float]
    """Work relative to no rematerialization: 1.0 for `none`."""
