"""From capacity to a mesh. World: up to 9 hosts of up to 9 devices in property tests, 12,500 hosts of 8 in one."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import RunConfig, parse_config
from trainer.errors import ConfigError
from trainer.planning import cost, search
from trainer.planning.capacity import Capacity, Host
from trainer.planning.footprint import REMAT_ORDER, AxisRule, Footprint, LeafSpec
from trainer.planning.memory import distinct_leaves, estimate_memory
from trainer.planning.mesh import MeshShape
from trainer.planning.topology import Refusal, TopologyPlan, check_minimum, plan_topology

RULES: dict[str, AxisRule] = {"embed": "fsdp", "mlp": "tensor", "vocab": "tensor", "norm": "none"}


def model(layers: int = 4, width: int = 64, hidden: int = 256, vocab: int = 1024, tokens: int = 128) -> Footprint:
    """A transformer's worth of numbers, with Adam."""
    arrays: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [("embedding", (vocab, width), ("vocab", "embed"))]
    for layer in range(layers):
        arrays += [
            (f"{layer}/up", (width, hidden), ("embed", "mlp")),
            (f"{layer}/down", (hidden, width), ("mlp", "embed")),
            (f"{layer}/scale", (width,), ("norm",)),
        ]
    leaves = [
        LeafSpec.model_validate({"path": f"{kind}/{path}", "shape": shape, "itemsize": 4, "axes": axes, "kind": kind})
        for path, shape, axes in arrays
        for kind in ("params", "optimizer", "optimizer")
    ]
    leaves.append(LeafSpec(path="step", shape=(), itemsize=4, axes=(), kind="other"))
    num_params = sum(leaf.nbytes for leaf in leaves if leaf.kind == "params") // 4
    kept = tokens * layers * width * 4
    return Footprint(
        leaves=tuple(leaves),
        axis_rules=RULES,
        flops_per_row=6.0 * num_params * tokens,
        activation_bytes_per_row={"none": 20 * kept, "dots": 8 * kept, "full": kept},
        activation_tensor_fraction=0.7,
        tensor_reduce_bytes_per_row=4.0 * layers * tokens * width * 4,
        remat_flops_factor={"none": 1.0, "dots": 1.15, "full": 4 / 3},
    )


SMALL = model()
REGRESSION = Footprint(
    leaves=(LeafSpec(path="w", shape=(3,), itemsize=4, axes=(None,), kind="params"),),
    axis_rules={},
    flops_per_row=18.0,
    activation_bytes_per_row={"none": 12},
    activation_tensor_fraction=0.0,
    tensor_reduce_bytes_per_row=0.0,
    remat_flops_factor={"none": 1.0},
)


def config(
    max_hosts: int = 4, *, min_hosts: int = 1, batch: int = 16, engine: Any = None, **parallelism: int
) -> RunConfig:
    return parse_config(
        {
            "run_name": "test",
            "steps": 10,
            "global_batch_size": batch,
            "num_hosts": {"min": min_hosts, "max": max_hosts},
            "engine": engine or {},
            "parallelism": {f"{axis}_parallelism": size for axis, size in parallelism.items()},
        }
    )


def hosts(num_hosts: int, devices_per_host: int = 2, hosts_per_slice: int = 1) -> Capacity:
    return Capacity.uniform(num_hosts, devices_per_host=devices_per_host, hosts_per_slice=hosts_per_slice)


def without(capacity: Capacity, *lost: str) -> Capacity:
    return Capacity(hosts=tuple(host for host in capacity.hosts if host.host_id not in lost))


def planned(*args: Any) -> TopologyPlan:
    plan = plan_topology(*args)
    assert isinstance(plan, TopologyPlan), plan
    return plan


def refused(*args: Any) -> Refusal:
    refusal = plan_topology(*args)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def numbers(plan: TopologyPlan) -> dict[str, Any]:
    return plan.model_dump(exclude={"hosts", "idle_hosts", "notes"})


# What a person expects.


@pytest.mark.parametrize("footprint", [SMALL, REGRESSION], ids=["transformer", "regression"])
@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "mesh", "rows"),
    [
        pytest.param(4, 2, (4, 1, 2, 1), 16, id="four hosts"),
        pytest.param(3, 2, (3, 1, 2, 1), 18, id="three hosts, with padding"),
        pytest.param(2, 2, (2, 1, 2, 1), 16, id="two hosts"),
        pytest.param(1, 2, (1, 1, 2, 1), 16, id="one host"),
        pytest.param(1, 1, (1, 1, 1, 1), 16, id="one device"),
        pytest.param(1, 8, (1, 1, 8, 1), 16, id="one big host"),
    ],
)
def test_every_device_is_used_when_the_batch_has_rows_for_it(
    footprint: Footprint, num_hosts: int, num_devices: int, mesh: tuple[int, int, int, int], rows: int
) -> None:
    plan = planned(config(), hosts(num_hosts, num_devices), footprint)
    assert plan.mesh.sizes == mesh
    assert plan.hosts == tuple(f"host-{index}" for index in range(num_hosts))
    assert (plan.num_microbatches, plan.rows_per_microbatch, plan.padding_rows) == (1, rows, rows - 16)
    assert (plan.idle_hosts, plan.idle_devices_per_host, plan.remat) == ((), 0, "none")
    assert bool(plan.notes) == bool(plan.padding_rows)


def test_what_idles_and_what_is_guessed_is_no_part_of_the_program() -> None:
    plan = planned(config(), hosts(4), SMALL)
    larger_pool = planned(config(engine={"dcn_bytes_per_second": 6e8}), hosts(6), SMALL, 10**9)
    assert plan.same_program(larger_pool)
    assert not plan.same_program(planned(config(), without(hosts(4), "host-1"), SMALL))
    assert not plan.same_program(planned(config(), without(hosts(5), "host-1"), SMALL))


def test_among_equals_more_hosts_are_used() -> None:
    plan = planned(config(5), hosts(5, 1), REGRESSION)
    assert (plan.mesh.sizes, plan.padding_rows) == ((5, 1, 1, 1), 4)  # four hosts would also take 4 rows each
    assert planned(config(16), hosts(16, 2), REGRESSION).mesh.sizes == (16, 1, 1, 1)  # not 8 hosts of 2 devices


def test_padding_is_reported_with_its_share() -> None:
    (note,) = planned(config(), hosts(3), SMALL).notes
    assert note.startswith("2 of 18 rows per step are padding (11.1%)")


def test_any_three_of_four_hosts_run_the_same_program_under_other_names() -> None:
    plans = [planned(config(), without(hosts(4), f"host-{lost}"), SMALL) for lost in range(4)]
    assert all(numbers(plan) == numbers(plans[0]) for plan in plans)
    assert len({plan.hosts for plan in plans}) == 4


def test_a_batch_smaller_than_the_pool_leaves_hosts_idle_and_says_so() -> None:
    plan = planned(config(64), hosts(64), SMALL)
    assert plan.mesh.batch_shards == 16
    assert plan.padding_rows == 0
    assert len(plan.hosts) + len(plan.idle_hosts) == 64
    assert any("global_batch_size 16 has no rows for more than 16 batch shards" in note for note in plan.notes)


def test_more_devices_than_rows_leave_devices_idle_and_says_so() -> None:
    plan = planned(config(batch=2), hosts(1, 8), SMALL)
    assert (plan.devices_per_host, plan.idle_devices_per_host) == (2, 6)
    assert plan.notes == ("6 devices of each used host idle: global_batch_size 2 has no rows for them",)


def test_hosts_beyond_the_maximum_are_ignored_and_named() -> None:
    plan = planned(config(2), hosts(4), SMALL)
    assert (plan.hosts, plan.idle_hosts) == (("host-0", "host-1"), ("host-2", "host-3"))
    assert plan.notes == ("host-2 and host-3 idle: num_hosts.max is 2",)


def test_a_slice_that_misses_a_host_idles_and_the_missing_host_is_named() -> None:
    capacity = without(hosts(4, hosts_per_slice=2), "host-3")
    plan = planned(config(engine={"hosts_per_slice": 2}), capacity, SMALL)
    assert (plan.hosts, plan.idle_hosts, plan.mesh.sizes) == (("host-0", "host-1"), ("host-2",), (1, 1, 4, 1))
    assert "host-2 idles: slice 1 misses host-3" in plan.notes


def test_a_broken_slice_of_hosts_with_other_names_is_counted() -> None:
    hosts_ = [Host(host_id=name, slice_index=number, num_devices=2) for number, name in [(0, "a"), (0, "b"), (1, "c")]]
    plan = planned(config(engine={"hosts_per_slice": 2}), Capacity(hosts=tuple(hosts_)), SMALL)
    assert "c idles: slice 1 misses 1 host of 2" in plan.notes


def test_slices_are_filled_in_host_order_with_the_mesh_inside_them() -> None:
    plan = planned(config(12, batch=64, engine={"hosts_per_slice": 2}), hosts(12, hosts_per_slice=2), SMALL)
    assert plan.hosts == tuple(f"host-{index}" for index in range(12))  # host-10 after host-9
    assert plan.mesh.sizes == (6, 1, 4, 1)


def test_a_host_with_fewer_devices_is_left_out_when_the_others_are_faster_alone() -> None:
    sizes = [8, 1, 8]
    capacity = Capacity(
        hosts=tuple(Host(host_id=f"host-{i}", slice_index=i, num_devices=size) for i, size in enumerate(sizes))
    )
    plan = planned(config(), capacity, SMALL)
    assert (plan.hosts, plan.devices_per_host, plan.idle_hosts) == (("host-0", "host-2"), 8, ("host-1",))
    assert plan.notes == ("host-1 idles: the mesh takes 8 devices of each host, and in its slice there are fewer",)


def test_devices_that_only_some_hosts_have_idle_and_are_reported() -> None:
    capacity = Capacity(hosts=tuple(Host(host_id=f"h{size}", slice_index=size, num_devices=size) for size in (2, 3)))
    plan = planned(config(batch=4), capacity, SMALL)
    assert (plan.mesh.sizes, plan.idle_devices_per_host) == ((2, 1, 2, 1), 0)
    assert plan.notes == ("some devices of h3 idle: other used hosts have only 2 devices",)


def test_slow_links_between_slices_idle_the_hosts_that_would_not_pay() -> None:
    plan = planned(config(engine={"dcn_bytes_per_second": 1e5}), hosts(4), SMALL)
    assert plan.hosts == ("host-0",)
    assert any("parallelism.dcn_data_parallelism" in note for note in plan.notes)
    forced = planned(config(engine={"dcn_bytes_per_second": 1e5}, dcn_data=4), hosts(4), SMALL)
    assert len(forced.hosts) == 4
    assert forced.step_seconds_guess > plan.step_seconds_guess


def test_tensor_parallelism_uses_devices_for_which_there_are_no_rows() -> None:
    alone = planned(config(batch=2), hosts(1, 8), SMALL)
    plan = planned(config(batch=2, ici_tensor=-1), hosts(1, 8), SMALL)
    assert plan.mesh.ici_tensor > 1
    assert plan.step_seconds_guess < alone.step_seconds_guess


def test_a_tensor_axis_of_the_planners_choice_divides_every_dim_that_it_shards() -> None:
    odd = model(hidden=255)  # 255 and the vocabulary of 1024 have no common divisor
    assert planned(config(batch=2, ici_tensor=-1), hosts(1, 8), odd).mesh.ici_tensor == 1
    thirds = model(hidden=48, vocab=63)
    assert planned(config(batch=1, ici_tensor=-1), hosts(1, 8), thirds).mesh.sizes == (1, 1, 1, 3)


# Fixed parallelism.


def test_fixed_sizes_are_kept_and_the_rest_idles() -> None:
    plan = planned(config(dcn_data=3), hosts(4), SMALL)
    assert (plan.mesh.dcn_data, plan.idle_hosts) == (3, ("host-3",))
    assert "host-3 idles: parallelism fixes 3 slices (dcn_data=3 × ici_fsdp=2)" in plan.notes
    plan = planned(config(ici_fsdp=3), hosts(1, 4), SMALL)
    assert (plan.mesh.ici_fsdp, plan.idle_devices_per_host) == (3, 1)
    assert "1 device of each used host idles: parallelism.ici_fsdp_parallelism is 3" in plan.notes


def test_a_fixed_tensor_axis_is_honoured_even_where_it_divides_nothing() -> None:
    assert planned(config(ici_tensor=3), hosts(2, 3), model(hidden=7, vocab=5)).mesh.ici_tensor == 3


def test_more_fixed_batch_shards_than_rows_work_on_padding_and_say_so() -> None:
    plan = planned(config(batch=2, dcn_data=4, ici_fsdp=1), hosts(4), SMALL)
    assert (plan.mesh.sizes, plan.padding_rows) == ((4, 1, 1, 1), 2)
    assert any(note.startswith("2 of 4 batch shards work on padding alone") for note in plan.notes)


@pytest.mark.parametrize(
    ("fixed", "capacity", "named"),
    [
        pytest.param(
            {"dcn_data": 3, "dcn_fsdp": 2},
            hosts(4),
            ["dcn_data_parallelism=3 with parallelism.dcn_fsdp_parallelism=2 needs 6 slices", "usable: 4"],
            id="slices",
        ),
        pytest.param({"ici_fsdp": 4}, hosts(4), ["needs 4 devices in a slice", "has 2"], id="devices"),
        pytest.param({"ici_fsdp": 3, "ici_tensor": 2}, hosts(4), ["needs 6 devices in a slice"], id="product"),
    ],
)
def test_fixed_sizes_that_cannot_be_met_are_refused_with_numbers(
    fixed: dict[str, int], capacity: Capacity, named: list[str]
) -> None:
    reason = refused(config(**fixed), capacity, SMALL).reason
    for part in named:
        assert part in reason


def test_fixed_sizes_that_do_not_spread_evenly_over_the_hosts_of_a_slice_are_refused() -> None:
    refusal = refused(config(engine={"hosts_per_slice": 2}, ici_fsdp=3), hosts(4, hosts_per_slice=2), SMALL)
    assert "the same number of devices from each of the 2 hosts" in refusal.reason


def test_fixed_sizes_that_too_few_slices_are_large_enough_for_are_refused() -> None:
    capacity = Capacity(hosts=tuple(Host(host_id=f"h{size}", slice_index=size, num_devices=size) for size in (2, 3)))
    refusal = refused(config(dcn_data=2, ici_fsdp=3), capacity, SMALL)
    assert "2 slices needed" in refusal.reason
    assert "not all are large enough" in refusal.reason


@pytest.mark.parametrize(
    "capacity",
    [
        pytest.param(Capacity(), id="no host"),
        pytest.param(hosts(1, hosts_per_slice=2), id="half a slice"),
        pytest.param(hosts(2, 0, hosts_per_slice=2), id="no device"),
    ],
)
def test_without_one_whole_slice_there_is_a_refusal(capacity: Capacity) -> None:
    refusal = refused(config(engine={"hosts_per_slice": 2}), capacity, SMALL)
    assert "usable" in refusal.reason
    assert "2 usable hosts" in refusal.needed


# Memory.


def test_less_memory_means_microbatches_then_rematerialization_then_a_refusal() -> None:
    seen = []
    for limit in range(8_000_000, 1_000_000, -50_000):
        plan = plan_topology(config(), hosts(4), SMALL, limit)
        if isinstance(plan, Refusal):
            seen.append("refused")
        else:
            assert plan.memory.fits
            assert plan.memory.limit_bytes == limit
            seen.append(f"{plan.num_microbatches} {plan.remat}")
    order = [key for key, _ in itertools.groupby(seen)]
    assert order == ["1 none", "2 none", "1 dots", "2 dots", "1 full", "2 full", "refused"]


def test_microbatches_and_rematerialization_are_explained_with_bytes() -> None:
    plan = planned(config(), hosts(4), SMALL, 1_800_000)
    assert (plan.num_microbatches, plan.remat) == (2, "full")
    microbatches, remat = plan.notes
    assert microbatches.startswith("2 microbatches of 1 row per batch shard")
    assert remat.startswith("rematerialization 'full'")
    assert "(1800000 bytes)" in microbatches
    assert "(1800000 bytes)" in remat


def test_microbatches_without_padding_are_preferred_to_fewer_with_it() -> None:
    row = SMALL.activation_bytes_per_row["none"]
    footprint = SMALL.model_copy(update={"activation_bytes_per_row": {"none": row}})
    state = estimate_memory(SMALL, MeshShape(dcn_data=1, dcn_fsdp=1, ici_fsdp=1, ici_tensor=1), 0, "none", None)
    plan = planned(config(batch=16), hosts(1, 1), footprint, state.total_bytes + 3 * row)
    assert (plan.num_microbatches, plan.rows_per_microbatch) == (8, 2)  # not 6 of 3, which would be 18 rows


def test_a_model_that_fits_in_no_other_way_is_spread_over_more_shards_than_rows() -> None:
    limit = 1_600_000
    plan = planned(config(batch=1), hosts(1, 8), SMALL, limit)
    assert plan.memory.fits
    assert plan.mesh.batch_shards > 1
    assert plan.padding_rows == plan.mesh.batch_shards - 1
    assert planned(config(batch=1), hosts(1, 8), SMALL).mesh.batch_shards == 1


def test_the_configured_memory_goes_before_the_measured_one() -> None:
    assert planned(config(), hosts(4), SMALL).memory.limit_bytes is None
    assert planned(config(), hosts(4), SMALL, 10**9).memory.limit_bytes == 10**9
    configured = config(engine={"device_memory_bytes": 10**8})
    assert planned(configured, hosts(4), SMALL, 10**9).memory.limit_bytes == 10**8


def test_a_model_that_does_not_fit_is_refused_with_bytes_needed_the_limit_and_the_part_to_blame() -> None:
    refusal = refused(config(), hosts(4), SMALL, 1_000_000)
    assert "the limit is 1 MB (1000000 bytes)" in refusal.reason
    assert "4 hosts" in refusal.reason
    needed = re.search(r"at least [\d.]+ MB \((\d+) bytes\)", refusal.reason)
    assert needed is not None
    assert "the largest part is optimizer state" in refusal.reason
    assert isinstance(plan_topology(config(), hosts(4), SMALL, int(needed[1])), TopologyPlan)
    assert isinstance(plan_topology(config(), hosts(4), SMALL, int(needed[1]) - 1), Refusal)


# The minimum.


def test_a_run_that_fits_its_minimum_is_accepted() -> None:
    assert check_minimum(config(), SMALL, None) is None
    assert check_minimum(config(), SMALL, 10**9) is None


def test_a_run_too_large_for_its_minimum_is_told_the_smallest_number_of_hosts_that_fits() -> None:
    sharded = config(min_hosts=1, max_hosts=8, dcn_fsdp=-1)
    limit = 1_300_000
    refusal = check_minimum(sharded, SMALL, limit)
    assert refusal is not None
    advice = re.search(r"set num_hosts.min to (\d+)", refusal.needed)
    assert advice is not None
    least = int(advice[1])
    assert 1 < least <= 8
    assert check_minimum(config(min_hosts=least, max_hosts=8, dcn_fsdp=-1), SMALL, limit) is None
    assert check_minimum(config(min_hosts=least - 1, max_hosts=8, dcn_fsdp=-1), SMALL, limit) is not None


def test_a_run_that_no_number_of_hosts_fits_is_told_which_fixed_setting_would_help() -> None:
    refusal = check_minimum(config(max_hosts=8), SMALL, 1_300_000)
    assert refusal is not None
    assert "no number of hosts up to num_hosts.max=8 would do" in refusal.needed
    assert "with parallelism.dcn_fsdp_parallelism = -1" in refusal.needed


def test_a_run_that_nothing_would_help_is_told_so() -> None:
    refusal = check_minimum(config(max_hosts=8), SMALL, 1000)
    assert refusal is not None
    assert "a smaller model" in refusal.needed


def test_the_minimum_is_rounded_up_to_whole_slices() -> None:
    engine = {"hosts_per_slice": 2}
    assert check_minimum(config(min_hosts=3, engine=engine, dcn_data=2), SMALL, None) is None
    refusal = check_minimum(config(min_hosts=2, engine=engine, dcn_data=2), SMALL, None)
    assert refusal is not None
    assert "set num_hosts.min to 4" in refusal.needed


def test_a_minimum_that_no_whole_slices_up_to_the_maximum_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_hosts.min \(3\) cannot be reached: num_hosts.max \(3\)"):
        config(min_hosts=3, max_hosts=3, engine={"hosts_per_slice": 2})


# Any capacity.

axis_names = st.sampled_from(["embed", "mlp", "vocab", "norm", "other", None])
leaf_specs = st.builds(
    lambda dims, kind: LeafSpec(
        path="leaf", shape=tuple(size for size, _ in dims), axes=tuple(axis for _, axis in dims), itemsize=4, kind=kind
    ),
    st.lists(st.tuples(st.sampled_from([1, 5, 6, 8, 12, 63, 64, 96]), axis_names), max_size=3),
    st.sampled_from(["params", "optimizer", "other"]),
)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    kept = draw(st.integers(0, 10**6))
    return Footprint(
        leaves=tuple(draw(st.lists(leaf_specs, max_size=4))),
        axis_rules=RULES,
        flops_per_row=draw(st.sampled_from([0.0, 1e3, 1e8, 1e11])),
        activation_bytes_per_row={"none": kept, "dots": kept // 2, "full": kept // 10},
        activation_tensor_fraction=draw(st.sampled_from([0.0, 0.5, 1.0])),
        tensor_reduce_bytes_per_row=draw(st.sampled_from([0.0, 1e4])),
        remat_flops_factor={"none": 1.0, "dots": 1.2, "full": 4 / 3},
    )


@st.composite
def capacities(draw: st.DrawFn, hosts_per_slice: int) -> Capacity:
    equal = draw(st.booleans())
    devices = draw(st.integers(1, 9))
    lost = draw(st.sets(st.integers(0, 8), max_size=3))
    present = set(range(draw(st.integers(3, 9)))) - lost
    return Capacity(
        hosts=tuple(
            Host(
                host_id=f"host-{index}",
                slice_index=index // hosts_per_slice,
                num_devices=devices if equal else draw(st.integers(1, 9)),
            )
            for index in sorted(present)
        )
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[RunConfig, Capacity, Footprint, int | None]:
    hosts_per_slice = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = st.sampled_from([-1] * 8 + [1] * 4 + [2, 3, 4])
    asked = config(
        max_hosts=draw(st.integers(hosts_per_slice, 9)),
        batch=draw(st.integers(1, 40)),
        engine={
            "hosts_per_slice": hosts_per_slice,
            "ici_bytes_per_second": draw(st.sampled_from([1e5, 4e9])),
            "dcn_bytes_per_second": draw(st.sampled_from([1e4, 5e8])),
        },
        **{axis: draw(sizes) for axis in ("dcn_data", "dcn_fsdp", "ici_fsdp", "ici_tensor")},
    )
    limit = draw(st.none() | st.integers(1_000, 2_000_000))
    return asked, draw(capacities(hosts_per_slice)), draw(footprints()), limit


@settings(max_examples=1200, deadline=None)
@given(questions())
def test_any_capacity_gives_a_legal_plan_or_a_refusal_with_numbers(
    question: tuple[RunConfig, Capacity, Footprint, int | None],
) -> None:
    asked, capacity, footprint, limit = question
    plan = plan_topology(*question)
    if isinstance(plan, Refusal):
        assert not any(True for _ in legal_plans(*question)), plan
        assert re.search(r"\d", plan.reason) or not capacity.hosts
        assert re.search(r"\d", plan.needed) or "at least one" in plan.needed
        return

    mesh = plan.mesh
    offered = {host.host_id: host for host in capacity.hosts}
    per_slice = asked.engine.hosts_per_slice
    # Hosts: whole slices, at most the maximum, each once, the rest named.
    assert mesh.num_devices == len(plan.hosts) * plan.devices_per_host
    assert len(plan.hosts) == mesh.num_slices * per_slice <= asked.num_hosts.max
    assert sorted([*plan.hosts, *plan.idle_hosts]) == sorted(offered)
    assert (
        plan.idle_devices_per_host == min(offered[host].num_devices for host in plan.hosts) - plan.devices_per_host >= 0
    )
    slice_of_process = [offered[host].slice_index for host in plan.hosts]
    assert slice_of_process == sorted(slice_of_process)
    assert all(slice_of_process.count(index) == per_slice for index in slice_of_process)
    for idle in plan.idle_hosts:
        assert any(idle in note or "…" in note for note in plan.notes)
    # The mesh: what is fixed is kept.
    for axis in type(mesh).model_fields:
        fixed = getattr(asked.parallelism, f"{axis}_parallelism")
        assert fixed in (-1, getattr(mesh, axis))
    # The batch: kept exactly, padding less than one row per shard and microbatch.
    assert plan.global_batch_size == asked.global_batch_size
    assert plan.rows_per_microbatch % mesh.batch_shards == 0
    chunk = plan.num_microbatches * mesh.batch_shards
    assert plan.rows_per_microbatch == mesh.batch_shards * -(-asked.global_batch_size // chunk)
    assert 0 <= plan.padding_rows < chunk
    # Memory.
    rows_per_shard = plan.rows_per_microbatch // mesh.batch_shards
    assert plan.memory == estimate_memory(footprint, mesh, rows_per_shard, plan.remat, limit)
    assert plan.memory.fits
    if plan.num_microbatches > 1:
        rows = -(-asked.global_batch_size // mesh.batch_shards)
        fewer = -(-rows // (plan.num_microbatches - 1))
        padded = plan.num_microbatches * rows_per_shard > rows
        assert not padded or not estimate_memory(footprint, mesh, fewer, plan.remat, limit).fits
    # No shard without a row, unless nothing else is legal.
    if mesh.batch_shards > asked.global_batch_size:
        assert not any(other.batch_shards <= asked.global_batch_size for other in legal_plans(*question))
    assert plan_topology(*question) == plan


def legal_plans(asked: RunConfig, capacity: Capacity, footprint: Footprint, limit: int | None) -> Iterator[MeshShape]:
    """By brute force: every mesh that obeys the rules and fits at one row per shard and full rematerialization."""
    per_slice = asked.engine.hosts_per_slice
    slices = [min(host.num_devices for host in group) for group in capacity.whole_slices(per_slice)]
    wanted = [getattr(asked.parallelism, f"{axis}_parallelism") for axis in MeshShape.model_fields]
    tensor_dims = [
        max(sharded)
        for leaf in footprint.leaves
        if (
            sharded := [
                s for s, a in zip(leaf.shape, leaf.axes, strict=True) if a is not None and RULES.get(a) == "tensor"
            ]
        )
    ]
    for devices in range(1, max(slices, default=0) + 1):
        num_slices = min(sum(size >= devices for size in slices), asked.num_hosts.max // per_slice)
        inside = per_slice * devices
        for data, fsdp in itertools.product(range(1, num_slices + 1), repeat=2):
            for tensor in range(1, inside + 1):
                if data * fsdp > num_slices or inside % tensor:
                    continue
                sizes = (data, fsdp, inside // tensor, tensor)
                if any(want not in (-1, size) for want, size in zip(wanted, sizes, strict=True)):
                    continue
                useful = bool(tensor_dims) and all(dim % tensor == 0 for dim in tensor_dims)
                if wanted[3] == -1 and tensor > 1 and not useful:
                    continue
                mesh = MeshShape(dcn_data=data, dcn_fsdp=fsdp, ici_fsdp=sizes[2], ici_tensor=tensor)
                if estimate_memory(footprint, mesh, 1, "full", limit).fits:
                    yield mesh


def judged(asked: RunConfig, footprint: Footprint, mesh: MeshShape, rows: int, microbatches: int, remat: Any) -> float:
    """What the planner minimizes first."""
    leaves = distinct_leaves(footprint.leaves)
    work = cost.compute_seconds(
        footprint, asked.engine, remat, ici_tensor=mesh.ici_tensor, shard_rows=rows * microbatches
    )
    moved = cost.communication_seconds(
        footprint,
        asked.engine,
        cost.estimate_traffic(footprint, leaves, mesh),
        mesh.sizes,
        shard_rows=rows * microbatches,
        num_microbatches=microbatches,
    )
    return work + cost.MICROBATCH_SECONDS * microbatches + max(0.0, moved - search.FREE_COMMUNICATION_SECONDS)


@settings(max_examples=400, deadline=None)
@given(questions())
def test_no_other_legal_mesh_is_cheaper_or_as_cheap_on_more_hosts(
    question: tuple[RunConfig, Capacity, Footprint, int | None],
) -> None:
    asked, _, footprint, limit = question
    plan = plan_topology(*question)
    if isinstance(plan, Refusal) or plan.mesh.batch_shards > asked.global_batch_size:
        return
    rows_per_shard = plan.rows_per_microbatch // plan.mesh.batch_shards
    chosen = judged(asked, footprint, plan.mesh, rows_per_shard, plan.num_microbatches, plan.remat)
    for mesh in legal_plans(*question):
        if mesh.batch_shards > asked.global_batch_size:
            continue
        rows = -(-asked.global_batch_size // mesh.batch_shards)
        for remat in REMAT_ORDER:
            most = next(
                r for r in range(rows, -1, -1) if r == 0 or estimate_memory(footprint, mesh, r, remat, limit).fits
            )
            if most:
                microbatches = -(-rows // most)
                other = judged(asked, footprint, mesh, -(-rows // microbatches), microbatches, remat)
                assert chosen <= other * (1 + 1e-9), (plan.mesh, mesh, remat)
                assert chosen != other or mesh.num_slices <= plan.mesh.num_slices, (plan.mesh, mesh, remat)


@settings(max_examples=200, deadline=None)
@given(questions(), st.permutations(range(9)))
def test_the_same_hosts_under_other_names_give_the_same_mesh(
    question: tuple[RunConfig, Capacity, Footprint, int | None], order: list[int]
) -> None:
    asked, capacity, footprint, limit = question
    renamed = Capacity(
        hosts=tuple(
            Host(host_id=f"pod-{50 + order[i]}", slice_index=order[host.slice_index] + 7, num_devices=host.num_devices)
            for i, host in enumerate(capacity.hosts)
        )
    )
    one, other = plan_topology(*question), plan_topology(asked, renamed, footprint, limit)
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        assert one == other
    else:
        assert (one.mesh, one.remat, one.num_microbatches) == (other.mesh, other.remat, other.num_microbatches)


@settings(max_examples=300, deadline=None)
@given(questions())
def test_one_more_slice_never_turns_a_plan_into_a_refusal_or_a_slower_one(
    question: tuple[RunConfig, Capacity, Footprint, int | None],
) -> None:
    asked, capacity, footprint, limit = question
    plan = plan_topology(*question)
    if isinstance(plan, Refusal):
        return
    per_slice = asked.engine.hosts_per_slice
    extra = tuple(Host(host_id=f"new-{i}", slice_index=99, num_devices=9) for i in range(per_slice))
    larger = plan_topology(asked, Capacity(hosts=capacity.hosts + extra), footprint, limit)
    assert isinstance(larger, TopologyPlan)
    if plan.mesh.batch_shards <= asked.global_batch_size:
        assert larger.step_seconds_guess <= plan.step_seconds_guess + search.FREE_COMMUNICATION_SECONDS + 1e-9


@settings(max_examples=300, deadline=None)
@given(questions())
def test_the_minimum_is_accepted_exactly_when_a_uniform_pool_of_that_size_has_a_plan(
    question: tuple[RunConfig, Capacity, Footprint, int | None],
) -> None:
    asked, _, footprint, limit = question
    per_slice = asked.engine.hosts_per_slice
    refusal = check_minimum(asked, footprint, limit)
    pool = hosts(per_slice, asked.engine.devices_per_host, per_slice)
    assert (refusal is None) == isinstance(plan_topology(asked, pool, footprint, limit), TopologyPlan)
    if refusal is not None and (advice := re.search(r"set num_hosts.min to (\d+)", refusal.needed)):
        least = int(advice[1])
        assert per_slice < least <= asked.num_hosts.max
        fits = [
            isinstance(
                plan_topology(asked, hosts(n, asked.engine.devices_per_host, per_slice), footprint, limit), TopologyPlan
            )
            for n in (least - per_slice, least)
        ]
        assert fits == [False, True]


@given(limit=st.integers(1, 5000), rows=st.integers(1, 5000))
def test_counts_worth_trying_are_legal_and_hold_the_fastest(limit: int, rows: int) -> None:
    counts = search.useful_counts(limit, rows)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, limit)
    assert len(counts) <= search.ALL_COUNTS_UP_TO
    fewest = -(-rows // limit)
    assert min(count for count in range(1, limit + 1) if -(-rows // count) == fewest) in counts


@given(number=st.integers(1, 5000), limit=st.integers(1, 6000))
def test_divisors_are_all_divisors_up_to_the_limit(number: int, limit: int) -> None:
    assert search.divisors(number, limit) == [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def test_the_ring_moves_almost_twice_the_array_and_nothing_alone() -> None:
    assert [cost.all_reduce_factor(size) for size in (1, 2, 4)] == [0, 1, 1.5]


def test_traffic_follows_how_the_parameters_lie() -> None:
    footprint = REGRESSION.model_copy(
        update={"leaves": (LeafSpec(path="w", shape=(8,), itemsize=1, axes=(None,), kind="params"),)}
    )
    leaves = distinct_leaves(footprint.leaves)

    def traffic(**sizes: int) -> tuple[int, ...]:
        ones = dict.fromkeys(MeshShape.model_fields, 1)
        return tuple(cost.estimate_traffic(footprint, leaves, MeshShape(**(ones | sizes))))

    assert traffic() == (0, 0, 8, 0)
    assert traffic(ici_fsdp=4) == (3 * 6, 0, 2, 0)  # two gathers and a reduce-scatter of 3/4
    assert traffic(ici_fsdp=3) == (round(2 * 2 / 3 * 8), 0, 8, 0)  # does not divide: an all-reduce
    assert traffic(dcn_fsdp=2, ici_fsdp=4) == (3 * 6, 3 * 1, 1, 0)
    assert traffic(dcn_fsdp=3) == (0, 0, 0, 8)  # replicated over dcn_fsdp: reduced over all slices


# Size.


@pytest.mark.parametrize("batch", [16, 1_000_000])
@pytest.mark.parametrize("parallelism", [{}, {"dcn_fsdp": -1, "ici_tensor": -1}], ids=["default", "all free"])
def test_planning_for_100_000_devices_is_quick(batch: int, parallelism: dict[str, int]) -> None:
    """0.1 s at most on an idle machine; five times that is allowed here."""
    capacity = hosts(12_500, 8, 8)
    engine = {"hosts_per_slice": 8, "devices_per_host": 8, "device_flops_per_second": 4e14}
    asked = config(12_500, batch=batch, engine=engine, **parallelism)
    large = model(layers=32, width=4096, hidden=16384, vocab=50304, tokens=2048)
    elapsed = []
    for _ in range(2):  # the better of two: the machine may be busy
        start = time.process_time()
        plan = planned(asked, capacity, large, 80 * 10**9)
        elapsed.append(time.process_time() - start)
    assert min(elapsed) < 0.5
    assert len(plan.hosts) + len(plan.idle_hosts) == 12_500
    assert plan.mesh.batch_shards <= batch


def test_candidates_grow_slower_than_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed, where links between slices are so slow that no layout is ruled out by its compute."""
    calls = 0
    original = search.Candidate

    def counting(*args: Any) -> search.Candidate:
        nonlocal calls
        calls += 1
        return original(*args)

    monkeypatch.setattr(search, "Candidate", counting)
    considered = []
    for num_hosts in (3_000, 12_000):
        calls = 0
        asked = config(
            num_hosts, batch=1_000_000, engine={"hosts_per_slice": 8, "dcn_bytes_per_second": 1e4}, dcn_fsdp=-1
        )
        planned(asked, hosts(num_hosts, 8, 8), SMALL)
        considered.append(calls)
    assert 0 < considered[1] < 2 * considered[0]
