"""From capacity to a mesh: `plan_topology` and the values it works on.

A plan is numbers only: it can be printed, compared and tested without a device. `trainer.compute.mesh` builds
the `jax.sharding.Mesh` of a plan; `trainer.planning.partition` says how each array lies on it.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from trainer.planning.footprint import Remat

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


class MemoryEstimate(BaseModel):
    """Bytes on the fullest device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    params_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    activations_bytes: int
    limit_bytes: int | None
    """None: no limit known."""

    @property
    def total_bytes(self) -> int:
        return self.params_bytes + self.optimizer_bytes + self.gradients_bytes + self.activations_bytes

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.total_bytes <= self.limit_bytes


class TopologyPlan(BaseModel):
    """How the next incarnation lies on its hosts.

    `hosts` are in process order: slice by slice, host order inside. Process `i` runs on `hosts[i]` and uses the
    first `devices_per_host` of its devices. The mesh's device array is these devices in order, reshaped to
    `mesh.sizes`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[str, ...]
    devices_per_host: int
    hosts_per_slice: int
    mesh: MeshShape
    global_batch_size: int
    num_microbatches: int
    rows_per_microbatch: int
    """Rows of one microbatch over the whole mesh, padding included; a multiple of `mesh.batch_shards`."""
    remat: Remat
    idle_hosts: tuple[str, ...] = ()
    """Usable hosts that the mesh leaves out."""
    idle_devices_per_host: int = 0
    """Devices of each used host that the mesh leaves out."""
    memory: MemoryEstimate
    step_seconds_guess: float
    """The cost model's guess. It ranks meshes; it is not a prediction."""
    notes: tuple[str, ...] = ()
    """Sentences for a person: why devices idle, why rematerialization, what padding costs."""

    @property
    def num_processes(self) -> int:
        return len(self.hosts)

    @property
    def padding_rows(self) -> int:
        """Rows of zero weight per step."""
        return self.num_microbatches * self.rows_per_microbatch - self.global_batch_size

    def same_program(self, other: TopologyPlan) -> bool:
        """Whether both compile to the same program for the same processes: then nothing is gained by a resize."""
        ignored = {"idle_hosts", "idle_devices_per_host", "notes"}
        return self.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


class Refusal(BaseModel):
    """Why there is no legal plan, and what would be needed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    needed: str
