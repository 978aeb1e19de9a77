"""Losses on meshes that are more than plain data parallelism, and with slices of several hosts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.multiprocess.harness import Run, assert_complete, assert_same_training
from trainer.records import GroupStarting, Incident

NewRun = Callable[..., Run]
pytestmark = pytest.mark.slow


def meshes(run: Run) -> list[tuple[int, int, int, int, int]]:
    """(hosts, dcn_data, dcn_fsdp, ici_fsdp, ici_tensor) of each worker group, in order."""
    return [(event.topology.num_processes, *event.topology.mesh.sizes) for event in run.of(GroupStarting)]


def lose_and_finish(run: Run, *host_ids: str) -> None:
    run.start()
    run.wait_step(25)
    run.kill_host(*host_ids)
    assert_complete(run, run.wait_end())
    lost = [host for event in run.of(Incident) for host in event.host_ids]
    assert sorted(lost) == sorted(host_ids), run.story()
    assert {event.cause for event in run.of(Incident)} == {"host_lost"}


def test_losing_one_host_of_a_slice_removes_the_slice(new_run: NewRun, reference: Run) -> None:
    """4 hosts are 2 slices: host-1's loss leaves host-0 idle and 2 hosts training."""
    run = new_run(**{"engine.hosts_per_slice": 2})
    lose_and_finish(run, "host-1")
    first, shrunk, *_ = run.of(GroupStarting)
    assert first.topology.hosts == ("host-0", "host-1", "host-2", "host-3")
    assert shrunk.topology.hosts == ("host-2", "host-3")
    assert shrunk.topology.idle_hosts == ("host-0",)
    assert meshes(run) == [(4, 2, 1, 4, 1), (2, 1, 1, 4, 1), (4, 2, 1, 4, 1)]
    assert_same_training(run, reference)


def test_a_tensor_parallel_run_shrinks_and_grows(new_run: NewRun, reference: Run) -> None:
    run = new_run(
        **{
            "num_hosts.max": 2,
            "engine.devices_per_host": 4,
            "parallelism.ici_fsdp_parallelism": 2,
            "parallelism.ici_tensor_parallelism": 2,
        }
    )
    lose_and_finish(run, "host-0")
    assert meshes(run) == [(2, 2, 1, 2, 2), (1, 1, 1, 2, 2), (2, 2, 1, 2, 2)]
    assert_same_training(run, reference)


def test_a_shrink_for_which_memory_is_short_shards_across_slices_instead(new_run: NewRun, reference: Run) -> None:
    """Fewer hosts mean more rows for each. The limit is just below what 2 replicas need, so 2 hosts hold one."""
    probe = new_run("probe", **{"parallelism.dcn_fsdp_parallelism": -1})
    plan = probe.shoal("plan", str(probe.config_path), "--hosts", "2", "--json")
    assert plan.returncode == 0, plan.stderr
    unlimited = json.loads(plan.stdout)
    assert unlimited["mesh"]["dcn_data"] == 2
    needed = sum(value for name, value in unlimited["memory"].items() if name != "limit_bytes")

    run = new_run(
        **{
            "parallelism.dcn_fsdp_parallelism": -1,
            "engine.device_memory_bytes": needed - 1,
            "engine.replacement_delay_seconds": 4.0,
        }
    )
    lose_and_finish(run, "host-1", "host-2")
    assert meshes(run)[0] == meshes(run)[-1] == (4, 4, 1, 2, 1)
    assert (2, 1, 2, 2, 1) in meshes(run), run.story()
    assert_same_training(run, reference)
