"""What a plan or a refusal says to a person: short sentences with the numbers and the setting to change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainer.config import RunConfig
from trainer.planning.capacity import Capacity, Host
from trainer.planning.footprint import Footprint
from trainer.planning.memory import MemoryEstimate, estimate_memory
from trainer.planning.mesh import MeshShape
from trainer.planning.search import Candidate, Offer

NAMED_UP_TO = 3  # longer lists are given as first … last


def plan_notes(
    config: RunConfig,
    capacity: Capacity,
    offer: Offer,
    footprint: Footprint,
    chosen: Candidate,
    used: Sequence[Host],
    limit_bytes: int | None,
) -> tuple[str, ...]:
    """Why hosts and devices idle, what padding costs, why microbatches and rematerialization."""
    layout = chosen.layout
    mesh = layout.mesh(chosen.dcn_data)
    batch = config.global_batch_size
    notes = _idle_host_notes(config, capacity, offer, mesh, used, layout.devices_per_host)
    notes += _idle_device_notes(config, used, mesh, layout.devices_per_host)
    if mesh.batch_shards > batch:
        notes.append(
            f"{mesh.batch_shards - batch} of {mesh.batch_shards} batch shards work on padding alone: "
            f"global_batch_size is {batch}, and fewer shards do not exist or do not fit into memory"
        )
    padded = mesh.batch_shards * chosen.num_microbatches * chosen.rows_per_shard
    if padded > batch:
        notes.append(
            f"{padded - batch} of {padded} rows per step are padding ({(padded - batch) / padded:.1%}): "
            f"{batch} rows do "
            f"not split evenly into {counted(mesh.batch_shards, 'batch shard')} × "
            f"{counted(chosen.num_microbatches, 'microbatch')}"
        )
    if chosen.num_microbatches > 1:
        notes.append(
            f"{chosen.num_microbatches} microbatches of {counted(chosen.rows_per_shard, 'row')} per batch shard: "
            f"{chosen.num_microbatches * chosen.rows_per_shard} rows at once would not fit into "
            f"{_limit(limit_bytes)} per device at this rematerialization"
        )
    if chosen.remat != "none":
        without = estimate_memory(footprint, mesh, chosen.rows_per_shard, "none", limit_bytes)
        notes.append(
            f"rematerialization {chosen.remat!r}: keeping all activations of "
            f"{counted(chosen.rows_per_shard, 'row')} would take {as_bytes(without.total_bytes)} of "
            f"{_limit(limit_bytes)} per device"
        )
    return tuple(notes)


def no_slice_reason(config: RunConfig, capacity: Capacity) -> str:
    """Why not one slice is usable."""
    if not capacity.hosts:
        return "no host is usable"
    hosts_per_slice = config.engine.hosts_per_slice
    return (
        f"{counted(len(capacity.hosts), 'host')} usable, but not one whole slice of "
        f"{counted(hosts_per_slice, 'host')} with at least 1 device each"
    )


def parallelism_reason(config: RunConfig, offer: Offer) -> str:
    """Why the fixed values of `parallelism` cannot be met, with what is there and what they need."""
    fixed = config.parallelism
    slices_needed = max(fixed.dcn_data_parallelism, 1) * max(fixed.dcn_fsdp_parallelism, 1)
    slices = offer.num_slices(1)
    if slices_needed > slices:
        return (
            f"{_fixed(config, 'dcn')} needs {counted(slices_needed, 'slice')} of "
            f"{counted(offer.hosts_per_slice, 'host')}; usable: {slices}"
        )
    inside = _fixed(config, "ici")
    devices_needed = max(fixed.ici_fsdp_parallelism, 1) * max(fixed.ici_tensor_parallelism, 1)
    most = offer.hosts_per_slice * offer.slice_devices[-1]
    if devices_needed > most:
        return f"{inside} needs {counted(devices_needed, 'device')} in a slice; the largest slice has {most}"
    if devices_needed % offer.hosts_per_slice:
        return (
            f"{inside} cannot take the same number of devices from each of the {offer.hosts_per_slice} hosts of a slice"
        )
    needed = f"{counted(slices_needed, 'slice')} needed in which {inside} fits"
    return f"{needed}; usable: {slices}, but not all are large enough"


def _fixed(config: RunConfig, links: str) -> str:
    """The fixed settings for mesh axes over `dcn` or `ici`, as a person wrote them."""
    return " with ".join(
        f"parallelism.{name}={size}"
        for name, size in config.parallelism.model_dump().items()
        if name.startswith(links) and size != -1
    )


def memory_reason(memory: MemoryEstimate, mesh: MeshShape, remat: str, num_hosts: int) -> str:
    """Why the model does not fit, at the mesh that needs the least memory."""
    return (
        f"the model does not fit on {counted(num_hosts, 'host')}: it needs at least {as_bytes(memory.total_bytes)} per "
        f"device ({mesh}, 1 row per microbatch, rematerialization {remat!r}), the limit is "
        f"{_limit(memory.limit_bytes)}; {dominant_part(memory)}"
    )


def dominant_part(memory: MemoryEstimate) -> str:
    """The part to blame, with its bytes."""
    parts = {
        "parameters": memory.params_bytes,
        "optimizer state": memory.optimizer_bytes,
        "gradients": memory.gradients_bytes,
        "activations": memory.activations_bytes,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"the largest part is {name} with {as_bytes(parts[name])} ({parts[name] / memory.total_bytes:.0%})"


def counted(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`, `2 batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def as_bytes(number: int) -> str:
    """Exact, with the power of 1000 that a person reads: settings are written so, and `shoal plan` shows tables so."""
    scaled, unit = float(number), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if scaled < 1000:
            break
        scaled, unit = scaled / 1000, larger
    return f"{number} bytes" if unit == "bytes" else f"{scaled:.4g} {unit} ({number} bytes)"


def _limit(limit_bytes: int | None) -> str:
    assert limit_bytes is not None, "without a limit everything fits"
    return as_bytes(limit_bytes)


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) > NAMED_UP_TO:
        return f"{hosts[0]} … {hosts[-1]} ({len(hosts)} hosts)"
    return " and ".join(hosts)


def _idle(hosts: Sequence[Host]) -> str:
    return f"{_names([host.host_id for host in hosts])} {'idles' if len(hosts) == 1 else 'idle'}"


def _idle_host_notes(
    config: RunConfig,
    capacity: Capacity,
    offer: Offer,
    mesh: MeshShape,
    used: Sequence[Host],
    devices_per_host: int,
) -> list[str]:
    used_slices = {host.slice_index for host in used}
    slices: dict[int, list[Host]] = {}
    for host in capacity.hosts:
        if host.slice_index not in used_slices:
            slices.setdefault(host.slice_index, []).append(host)

    broken: list[tuple[list[Host], str]] = []
    small: list[Host] = []
    spare: list[Host] = []
    for _, hosts in sorted(slices.items()):
        if len(hosts) != offer.hosts_per_slice:
            broken.append((hosts, _broken_slice(hosts, offer.hosts_per_slice)))
        elif min(host.num_devices for host in hosts) < devices_per_host:
            small += hosts
        else:
            spare += hosts

    notes = []
    if len(broken) > NAMED_UP_TO:
        hosts = [host for some, _ in broken for host in some]
        notes.append(f"{_idle(hosts)}: {len(broken)} slices do not have exactly {offer.hosts_per_slice} hosts")
    else:
        notes += [f"{_idle(hosts)}: {why}" for hosts, why in broken]
    if small:
        notes.append(
            f"{_idle(small)}: the mesh takes {counted(devices_per_host, 'device')} of each "
            f"host, and in {'its' if len(small) == 1 else 'their'} slice there are fewer"
        )
    if spare:
        notes.append(f"{_idle(spare)}: {_spare_reason(config, offer, mesh)}")
    return notes


def _spare_reason(config: RunConfig, offer: Offer, mesh: MeshShape) -> str:
    """Why a whole slice with enough devices is left out."""
    fixed = config.parallelism
    batch = config.global_batch_size
    if mesh.num_slices == offer.max_slices:
        return f"num_hosts.max is {config.num_hosts.max}"
    if fixed.dcn_data_parallelism != -1 and fixed.dcn_fsdp_parallelism != -1:
        return f"parallelism fixes {counted(mesh.num_slices, 'slice')} ({mesh})"
    if fixed.dcn_data_parallelism == -1 and mesh.batch_shards // mesh.dcn_data * (mesh.dcn_data + 1) > batch:
        return f"global_batch_size {batch} has no rows for more than {counted(mesh.batch_shards, 'batch shard')}"
    if fixed.dcn_data_parallelism == -1:
        return (
            "by the planner's guess they would not make a step faster "
            "(to use them anyway, set parallelism.dcn_data_parallelism)"
        )
    return "by the planner's guess they would not make a step faster"


def _idle_device_notes(config: RunConfig, used: Sequence[Host], mesh: MeshShape, devices_per_host: int) -> list[str]:
    idle = min(host.num_devices for host in used) - devices_per_host
    notes = []
    if idle:
        fixed = config.parallelism
        one_more = mesh.batch_shards // devices_per_host * (devices_per_host + 1)
        if fixed.ici_fsdp_parallelism != -1:
            why = f"parallelism.ici_fsdp_parallelism is {fixed.ici_fsdp_parallelism}"
        elif one_more > config.global_batch_size:
            why = f"global_batch_size {config.global_batch_size} has no rows for them"
        else:
            why = "by the planner's guess they would not make a step faster"
        notes.append(f"{counted(idle, 'device')} of each used host {'idles' if idle == 1 else 'idle'}: {why}")
    larger = [host.host_id for host in used if host.num_devices > devices_per_host + idle]
    if larger:
        notes.append(
            f"some devices of {_names(larger)} idle: other used hosts have only "
            f"{counted(devices_per_host + idle, 'device')}"
        )
    return notes


def _broken_slice(hosts: Sequence[Host], hosts_per_slice: int) -> str:
    slice_index = hosts[0].slice_index
    if len(hosts) > hosts_per_slice:
        return f"slice {slice_index} has {len(hosts)} hosts, engine.hosts_per_slice is {hosts_per_slice}"
    missing = _missing_names(hosts, hosts_per_slice)
    what = " and ".join(missing) if missing else f"{counted(hosts_per_slice - len(hosts), 'host')} of {hosts_per_slice}"
    return f"slice {slice_index} misses {what}"


def _missing_names(hosts: Iterable[Host], hosts_per_slice: int) -> list[str]:
    """Names of the lost hosts, if those present follow `Capacity.uniform`: slice `i` begins at host `i * size`."""
    present = {}
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d+)", host.host_id)
        if match is None or int(match[2]) // hosts_per_slice != host.slice_index:
            return []
        present[int(match[2])] = match[1]
    if len(set(present.values())) != 1:
        return []
    prefix = next(iter(present.values()))
    first = min(present) // hosts_per_slice * hosts_per_slice
    missing = [f"{prefix}{number}" for number in range(first, first + hosts_per_slice) if number not in present]
    return missing if len(missing) <= NAMED_UP_TO else []
