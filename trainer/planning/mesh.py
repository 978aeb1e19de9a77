"""The shape of a mesh, as numbers. `trainer.compute.mesh` builds the `jax.sharding.Mesh` of one."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

# Mesh axes in MaxText's terms, outermost first: across slices, then inside one.
MESH_AXES = ("dcn_data", "dcn_fsdp", "ici_fsdp", "ici_tensor")
BATCH_AXES = ("dcn_data", "dcn_fsdp", "ici_fsdp")  # the mesh axes that sample rows are sharded over
FSDP_AXES = ("dcn_fsdp", "ici_fsdp")


class MeshShape(BaseModel):
    """Sizes of the mesh axes. `dcn_data * dcn_fsdp` slices of `ici_fsdp * ici_tensor` devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dcn_data: int = Field(ge=1)
    dcn_fsdp: int = Field(ge=1)
    ici_fsdp: int = Field(ge=1)
    ici_tensor: int = Field(ge=1)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In `MESH_AXES` order."""
        return (self.dcn_data, self.dcn_fsdp, self.ici_fsdp, self.ici_tensor)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_slices(self) -> int:
        return self.dcn_data * self.dcn_fsdp

    @property
    def batch_shards(self) -> int:
        """Ways that the rows of a microbatch are split."""
        return self.dcn_data * self.dcn_fsdp * self.ici_fsdp

    def __str__(self) -> str:
        named = [f"{name}={size}" for name, size in zip(MESH_AXES, self.sizes, strict=True) if size > 1]
        return " × ".join(named) or "1 device"
