"""The other elastic mode, and changes of capacity that are planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiprocess.harness import STEPS, Run, assert_complete, assert_same_training
from trainer.records import (
    CheckpointCommitted,
    GroupEnded,
    GroupStarting,
    HostChanged,
    Incident,
    Recovered,
    RunEnded,
    Waiting,
)

NewRun = Callable[..., Run]
pytestmark = pytest.mark.slow


def test_a_pausing_run_waits_for_its_host_and_goes_on_to_the_same_bits(new_run: NewRun, reference: Run) -> None:
    run = new_run(**{"elastic.mode": "pause", "engine.replacement_delay_seconds": 3.0})
    run.start()
    run.wait_step(25)
    run.kill_host("host-2")
    waiting = run.wait_event(Waiting)
    assert (waiting.usable, waiting.needed) == (3, 4)
    assert "host-2" in waiting.reason
    assert run.processes(), "a paused run keeps its living hosts"
    assert {state["state"] for host, state in run.hosts().items() if host != "host-2"} == {"ready"}
    assert_complete(run, run.wait_end())
    assert [event.topology.hosts for event in run.of(GroupStarting)] == [("host-0", "host-1", "host-2", "host-3")] * 2
    (incident,), (recovered,) = run.of(Incident), run.of(Recovered)
    assert (incident.cause, incident.host_ids) == ("host_lost", ("host-2",))
    assert (recovered.from_hosts, recovered.to_hosts) == (4, 4)
    assert recovered.down_seconds >= 3.0
    assert_same_training(run, reference)  # to the bit: the topology never changed


def test_a_pausing_run_whose_host_never_returns_gives_up_with_its_state_saved(new_run: NewRun) -> None:
    run = new_run(
        **{
            "elastic.mode": "pause",
            "engine.replacement_delay_seconds": -1.0,
            "elastic.wait_for_capacity_seconds": 4.0,
        }
    )
    run.start()
    run.wait_event(CheckpointCommitted, lambda event: event.step == 20)
    run.kill_host("host-1")
    waiting = run.wait_event(Waiting)
    assert run.wait_end() == 4, run.story()
    run.assert_nothing_left()
    ended = run.of(RunEnded)[-1]
    assert (ended.outcome, ended.cause) == ("failed", "no_capacity")
    assert 4.0 <= ended.monotonic - waiting.monotonic < 10.0
    assert "host-1" in run.output
    assert "wait_for_capacity_seconds" in run.output
    newest = run.history().newest_commit
    assert newest is not None
    assert newest.step == ended.step >= 20
    assert len(run.of(HostChanged, lambda event: event.host_id == "host-1" and event.state == "starting")) == 1


def test_planned_changes_of_capacity_lose_and_repeat_no_step(new_run: NewRun, reference: Run) -> None:
    run = new_run(env={"SHOAL_TEST_ROW_SECONDS": "0.06"})
    run.start()
    run.wait_step(8)
    # The command takes seconds on a busy machine; on one host steps are slow enough for that.
    for number, (hosts, through_command_line) in enumerate([(1, False), (3, True), (4, False), (2, False)], start=1):
        if through_command_line:
            said = run.shoal("capacity", str(run.directory), "--hosts", str(hosts))
            assert said.returncode == 0, said.stderr
        else:
            run.set_capacity(hosts)
        run.wait_event(GroupStarting, lambda event, hosts=hosts: event.topology.num_processes == hosts)
        run.wait_event(Recovered, lambda _, number=number: len(run.of(Recovered)) >= number)
        steps = len(run.trained)
        run.wait_step(run.trained[-1][1].step + 2, since=steps)
    assert_complete(run, run.wait_end())
    assert [event.topology.num_processes for event in run.of(GroupStarting)] == [4, 1, 3, 4, 2], run.story()
    assert run.of(Incident) == []
    recoveries = run.of(Recovered)
    assert [(r.cause, r.planned, r.from_hosts, r.to_hosts) for r in recoveries] == [
        ("drained", True, 4, 1),
        ("drained", True, 1, 3),
        ("drained", True, 3, 4),
        ("drained", True, 4, 2),
    ]
    assert all(recovered.step == recovered.resumed_from for recovered in recoveries)
    assert [event.cause for event in run.of(GroupEnded)] == ["drained"] * 4 + ["completed"]
    # Not one step was trained twice, in any incarnation.
    assert [metrics.step for _, metrics in run.trained] == list(range(1, STEPS + 1))
    assert_same_training(run, reference, abandoned=0)
    withdrawn = {event.host_id for event in run.of(HostChanged, lambda event: event.state == "withdrawn")}
    assert withdrawn == {"host-1", "host-2", "host-3"}


def test_a_run_without_any_host_waits_and_goes_on_when_there_are_some(new_run: NewRun, reference: Run) -> None:
    run = new_run()
    run.start()
    run.wait_step(15)
    run.set_capacity(0)
    waiting = run.wait_event(Waiting)
    assert (waiting.usable, waiting.needed) == (0, 1)
    # Its hosts are let go while it waits: they are somebody else's by now.
    run.wait_event(HostChanged, lambda event: len(withdrawals(run)) == 4)
    run.set_capacity(4)
    assert_complete(run, run.wait_end())
    assert run.of(Incident) == []
    assert_same_training(run, reference, abandoned=0)


def withdrawals(run: Run) -> list[HostChanged]:
    return run.of(HostChanged, lambda event: event.state == "withdrawn")
