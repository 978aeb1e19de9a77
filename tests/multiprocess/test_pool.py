"""A service with a pool: hosts outlive the runs that use them, and runs grow when the pool does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.serve import service_id
from tests.multiprocess.harness import STEPS, Run, assert_same_training, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer import wire
from trainer.records import CheckpointCommitted, FirstStep, GroupStarting, Recovered, RunEnded, Waiting

pytestmark = pytest.mark.slow


def pool_of(run: Run, service: Service, *options: str) -> wire.PoolView:
    """`shoal pool --json`."""
    finished = run.shoal("pool", service_id(service.path), "--json", *options)
    assert finished.returncode == 0, finished.stderr
    return wire.PoolView.model_validate(json.loads(finished.stdout))


def agents(view: wire.PoolView) -> dict[str, int | None]:
    return {host.host_id: host.pid for host in view.hosts if host.state == "ready"}


def assert_complete(run: Run) -> None:
    (*_, ended) = run.of(RunEnded)
    assert (ended.outcome, ended.step) == ("complete", STEPS), run.story()


def test_a_run_grows_with_its_pool_and_the_hosts_outlive_flow_and_run(
    new_run: Callable[..., Run], new_service: Callable[..., Service], reference: Run, tmp_path: Path
) -> None:
    first, second, third = (new_run(name, run_name=name) for name in ("first", "second", "third"))
    service = new_service(
        {"first": first, "second": second, "third": third},
        pool={
            "hosts": 4,
            "engine": {"devices_per_host": 2, "replacement_delay_seconds": 1.0},
            "contact_timeout_seconds": 5.0,
        },
        look_at_pool_seconds=3600,
    )
    pause = tmp_path / "pause"
    # 0.8 s a step on two hosts, 0.4 s on four
    service.start(first.cwd, SHOAL_TEST_ROW_SECONDS="0.1", SHOAL_TEST_PAUSE=str(pause))
    wait_until(lambda: len(pool_of(first, service).free) == 4, PATIENCE_SECONDS, lambda: "four hosts are there")
    pool_of(first, service, "--hosts", "2")
    wait_until(lambda: len(agents(pool_of(first, service))) == 2, PATIENCE_SECONDS, lambda: "two hosts are left")

    # It trains on what there is, and grows by itself, without losing a step, when there is more.
    flow_run = service.submit("first")
    first.wait_step(2, timeout=PATIENCE_SECONDS)
    assert [tenancy.run for tenancy in pool_of(first, service).tenancies] == [str(first.directory)]
    pool_of(first, service, "--hosts", "4")
    grown = first.wait_event(Recovered, timeout=PATIENCE_SECONDS)
    assert (grown.planned, grown.from_hosts, grown.to_hosts) == (True, 2, 4), first.story()
    assert grown.step == grown.resumed_from
    artifacts = wait_until(
        lambda: service.call("POST", "/artifacts/filter", {"artifacts": {"key": {"any_": ["shoal-scale-up"]}}}),
        PATIENCE_SECONDS,
        lambda: f"the flow tells what the growth cost: {service.output}",
    )
    assert "**first**: 2 → 4 hosts (host-2, host-3 joined)" in artifacts[0]["data"]
    assert "the first step on 4 hosts" in artifacts[0]["data"]
    print(artifacts[0]["data"])

    # Its flow process dies; the next one finds the same hosts.
    before = agents(pool_of(first, service))
    first.wait_event(CheckpointCommitted, lambda event: event.incarnation == grown.incarnation)
    (process,) = service.flow_processes(flow_run)
    process.kill()
    service.wait_state(flow_run, "Completed")
    assert_complete(first)
    assert_same_training(first, reference)
    assert agents(pool_of(first, service)) == before

    # Two runs that want all of it: one after the other.
    flow_runs = [service.submit("second")]
    second.wait_event(FirstStep, timeout=PATIENCE_SECONDS)
    pause.touch()
    flow_runs.append(service.submit("third"))
    waiting = third.wait_event(Waiting, timeout=PATIENCE_SECONDS)
    pause.unlink()
    assert waiting.usable == 0
    for each in flow_runs:
        service.wait_state(each, "Completed")
    for run in (second, third):
        assert_complete(run)
        assert_same_training(run, reference, abandoned=0)
        (group,) = run.of(GroupStarting)
        assert len(group.topology.hosts) == 4
    assert second.of(RunEnded)[-1].time < third.of(FirstStep)[0].time
    view = pool_of(first, service)
    assert agents(view) == before
    assert view.tenancies == ()
    assert len(view.free) == 4

    assert service.stop() == 0
    assert service.processes() == []
    pool = service_id(service.path)
    assert f"no pool {pool} is kept" in first.shoal("pool", pool).stderr
