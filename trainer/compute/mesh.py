"""The `jax.sharding.Mesh` of a plan, and the sharding of everything that lives on it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import GroupFailedError
from trainer.planning.footprint import AxisRule
from trainer.planning.partition import partition_dims
from trainer.planning.topology import BATCH_AXES, MESH_AXES, MeshShape, TopologyPlan

PyTree = Any


def build_mesh(topology: TopologyPlan) -> Mesh:
    """Devices in process order, the first `devices_per_host` of each, reshaped to the plan's axes.

    Raises:
        GroupFailedError: a process has fewer devices than the plan counts on.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    devices: list[jax.Device] = []
    for process_index, host_id in enumerate(topology.hosts):
        own = by_process.get(process_index, [])
        if len(own) < topology.devices_per_host:
            raise GroupFailedError(
                f"{host_id} shows {len(own)} devices, the plan needs {topology.devices_per_host}",
                cause="worker_crashed",
            )
        devices += own[: topology.devices_per_host]
    # Auto axes: shardings follow from the inputs' partition specs, and XLA places the collectives.
    return Mesh(np.array(devices).reshape(topology.mesh.sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_shape(mesh: Mesh) -> MeshShape:
    return MeshShape(**{axis: mesh.shape[axis] for axis in MESH_AXES})


def state_shardings(mesh: Mesh, abstract_state: PyTree, axes: PyTree, axis_rules: dict[str, AxisRule]) -> PyTree:
    """One NamedSharding per leaf, by the same rule that the plan's memory estimate used."""
    shape = mesh_shape(mesh)

    def sharding(leaf: jax.ShapeDtypeStruct, leaf_axes: Any) -> NamedSharding:
        dims = partition_dims(leaf.shape, leaf_axes.names, axis_rules, shape)
        return NamedSharding(mesh, PartitionSpec(*(dim or None for dim in dims)))

    return jax.tree.map(sharding, abstract_state, axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays of microbatches x rows x …: rows over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def per_device_sharding(mesh: Mesh) -> NamedSharding:
    """For vectors with one element per device."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
