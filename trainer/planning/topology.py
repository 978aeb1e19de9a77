"""From capacity to a mesh: `plan_topology` and the values it works on.

A plan is numbers only: it can be printed, compared and tested without a device. `trainer.compute.mesh` builds
the `jax.sharding.Mesh` of a plan; `trainer.planning.partition` says how each array lies on it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from trainer.config import RunConfig
from trainer.planning.capacity import Capacity, host_order
from trainer.planning.explain import counted, memory_reason, no_slice_reason, parallelism_reason, plan_notes
from trainer.planning.footprint import Footprint, Remat
from trainer.planning.memory import MemoryEstimate, estimate_memory
from trainer.planning.mesh import BATCH_AXES, FSDP_AXES, MESH_AXES, MeshShape
from trainer.planning.search import Candidate, Offer, Search

__all__ = [
    "BATCH_AXES",
    "FSDP_AXES",
    "MESH_AXES",
    "MemoryEstimate",
    "MeshShape",
    "Refusal",
    "TopologyPlan",
    "check_minimum",
    "plan_topology",
]


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
    """Devices that each used host has and the mesh leaves out; some hosts may have more, the notes name them."""
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
        ignored = {"idle_hosts", "idle_devices_per_host", "memory", "step_seconds_guess", "notes"}
        return self.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


class Refusal(BaseModel):
    """Why there is no legal plan, and what would be needed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    needed: str


def plan_topology(
    config: RunConfig, capacity: Capacity, footprint: Footprint, device_memory_bytes: int | None = None
) -> TopologyPlan | Refusal:
    """The fastest legal mesh on the usable hosts, by the guess of `trainer.planning.cost`.

    `device_memory_bytes` is what the engine measured; `engine.device_memory_bytes` goes before it. Whether there are
    enough hosts to start (`num_hosts.min`) is not asked here. The same numbers of hosts and devices give the same
    plan but for the names of the hosts. Never raises: what cannot be planned is a `Refusal`.
    """
    hosts_per_slice = config.engine.hosts_per_slice
    slices = [hosts for hosts in capacity.whole_slices(hosts_per_slice) if all(host.num_devices > 0 for host in hosts)]
    if not slices:
        return Refusal(
            reason=no_slice_reason(config, capacity),
            needed=f"at least one whole slice: {counted(hosts_per_slice, 'usable host')} of the same slice",
        )
    devices = [min(host.num_devices for host in hosts) for hosts in slices]
    offer = Offer(hosts_per_slice, tuple(sorted(devices)), config.num_hosts.max // hosts_per_slice)
    limit_bytes = config.engine.device_memory_bytes or device_memory_bytes
    search = Search(config, footprint, limit_bytes)
    chosen = _choose(config, search, offer, footprint, limit_bytes)
    if isinstance(chosen, Refusal):
        return chosen

    layout = chosen.layout
    mesh = layout.mesh(chosen.dcn_data)
    eligible = [hosts for hosts, least in zip(slices, devices, strict=True) if least >= layout.devices_per_host]
    used = [host for hosts in eligible[: mesh.num_slices] for host in hosts]
    used_ids = {host.host_id for host in used}
    idle = (host.host_id for host in capacity.hosts if host.host_id not in used_ids)
    return TopologyPlan(
        hosts=tuple(host.host_id for host in used),
        devices_per_host=layout.devices_per_host,
        hosts_per_slice=hosts_per_slice,
        mesh=mesh,
        global_batch_size=config.global_batch_size,
        num_microbatches=chosen.num_microbatches,
        rows_per_microbatch=mesh.batch_shards * chosen.rows_per_shard,
        remat=chosen.remat,
        idle_hosts=tuple(sorted(idle, key=host_order)),
        idle_devices_per_host=min(host.num_devices for host in used) - layout.devices_per_host,
        memory=estimate_memory(footprint, mesh, chosen.rows_per_shard, chosen.remat, limit_bytes),
        step_seconds_guess=chosen.seconds,
        notes=plan_notes(config, capacity, offer, footprint, chosen, used, limit_bytes),
    )


def check_minimum(config: RunConfig, footprint: Footprint, device_memory_bytes: int | None) -> Refusal | None:
    """Why the run could not train at its own minimum size, `num_hosts.min` rounded up to whole slices, or None.

    Asked at submission, with hosts as `engine` describes them. `needed` names the smallest number of hosts that
    would do, up to `num_hosts.max`.
    """
    min_slices = -(-config.num_hosts.min // config.engine.hosts_per_slice)
    limit_bytes = config.engine.device_memory_bytes or device_memory_bytes
    search = Search(config, footprint, limit_bytes)
    chosen = _choose(config, search, _uniform_offer(config, min_slices), footprint, limit_bytes)
    return chosen if isinstance(chosen, Refusal) else None


def _choose(
    config: RunConfig, search: Search, offer: Offer, footprint: Footprint, limit_bytes: int | None
) -> Candidate | Refusal:
    layouts = search.layouts(offer)
    chosen = search.cheapest(layouts)
    if chosen is not None:
        return chosen
    if not layouts:
        reason = parallelism_reason(config, offer)
    else:
        layout, remat = search.smallest(layouts)
        mesh = layout.mesh(layout.data_counts[0])
        memory = estimate_memory(footprint, mesh, 1, remat, limit_bytes)
        reason = memory_reason(memory, mesh, remat, offer.num_slices(1) * offer.hosts_per_slice)
    return Refusal(reason=reason, needed=_what_would_do(config, search, offer, footprint, limit_bytes))


def _what_would_do(
    config: RunConfig, search: Search, offer: Offer, footprint: Footprint, limit_bytes: int | None
) -> str:
    """Settings that would give a plan: more hosts, else free parallelism, else nothing but a smaller model."""
    first = offer.num_slices(1) + 1
    num_hosts = _smallest_fit(config, search, first)
    if num_hosts is not None:
        return (
            f"{counted(num_hosts, 'host')} of {config.engine.devices_per_host} devices each would do: "
            f"set num_hosts.min to {num_hosts} (num_hosts.max is {config.num_hosts.max})"
        )
    none_fits = f"no number of hosts up to num_hosts.max={config.num_hosts.max} would do"
    fixed = [name for name in type(config.parallelism).model_fields if getattr(config.parallelism, name) != -1]
    for names in (*([name] for name in fixed), fixed):
        parallelism = config.parallelism.model_copy(update=dict.fromkeys(names, -1))
        freed = config.model_copy(update={"parallelism": parallelism})
        num_hosts = _smallest_fit(freed, Search(freed, footprint, limit_bytes), 1)
        if num_hosts is not None:
            settings = ", ".join(f"parallelism.{name}" for name in names)
            return f"{none_fits}; with {settings} = -1 (the planner decides) {counted(num_hosts, 'host')} would do"
    return f"{none_fits}: a smaller model, more memory per device or a larger num_hosts.max is needed"


def _smallest_fit(config: RunConfig, search: Search, first_slices: int) -> int | None:
    """Hosts of the smallest number of slices, from `first_slices` to `num_hosts.max`, that has a legal plan.

    By bisection: what is legal on some slices is legal on more, since slices may idle.
    """
    low, high = first_slices, config.num_hosts.max // config.engine.hosts_per_slice
    if low > high or not search.fits(_uniform_offer(config, high)):
        return None
    while low < high:
        middle = (low + high) // 2
        if search.fits(_uniform_offer(config, middle)):
            high = middle
        else:
            low = middle + 1
    return low * config.engine.hosts_per_slice


def _uniform_offer(config: RunConfig, num_slices: int) -> Offer:
    return Offer(config.engine.hosts_per_slice, (config.engine.devices_per_host,) * num_slices, num_slices)
