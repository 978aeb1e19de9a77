"""Journal events as lines for people, in the words that users of Ray and MaxText know."""

from __future__ import annotations

import datetime

from trainer import records
from trainer.planning.topology import TopologyPlan
from trainer.records import Event, MetricsRecord


class Narrator:
    """Feed it everything in order; it answers with a line where a person would want one."""

    def __init__(self) -> None:
        self._topology: TopologyPlan | None = None
        self._saved_on: object = None
        """Mesh of the group before; the checkpoint may be older, but then its mesh does not matter to a reader."""
        self._restored: records.RestoredFrom | None = None
        self._first_step: records.FirstStep | None = None

    def line(self, item: Event | MetricsRecord) -> str | None:
        match item:
            case records.MetricsRecord():
                return self._resumed_line(item)
            case records.RunOpened():
                if item.resumed:
                    commit = (
                        "no commit yet" if item.newest_commit is None else f"newest commit at step {item.newest_commit}"
                    )
                    return f"run continues: {commit}, {item.steps} steps in all"
                return f"new run: {item.steps} steps"
            case records.HostChanged(state="lost"):
                return f"{item.host_id} lost" + (f": {item.reason}" if item.reason else "")
            case records.HostChanged(state="ready"):
                return f"{item.host_id} ready"
            case records.HostChanged(state="withdrawn"):
                return f"{item.host_id} withdrawn"
            case records.CapacityChanged():
                source = "" if item.source == "local" else f" by the {item.source}"
                price = "" if item.price_per_host_hour is None else f" at {item.price_per_host_hour:g} per host-hour"
                return f"capacity changed: {hosts(item.offered)} offered{source}{price}"
            case records.GrowHeld():
                return held_line(item.num_hosts, item.reason, item.until)
            case records.GroupStarting():
                before, self._topology = self._topology, item.topology
                resized = ""
                if before is not None and before.num_processes != item.topology.num_processes:
                    resized = f"worker group resized {before.num_processes} -> {item.topology.num_processes}; "
                idle = f", idle: {', '.join(item.topology.idle_hosts)}" if item.topology.idle_hosts else ""
                return (
                    f"{resized}incarnation {item.incarnation} starts on {hosts(item.topology.num_processes)}, "
                    f"mesh {item.topology.mesh}{idle}"
                )
            case records.GroupReady():
                self._restored = item.restored_from
                mesh = self._topology.mesh if self._topology else "?"
                saved_on, self._saved_on = self._saved_on, mesh
                if item.restored_from.tier == "init":
                    return f"train state initialized on mesh {mesh}"
                resharded = "restored onto" if saved_on in (None, mesh) else "resharded onto"
                return (
                    f"checkpoint loaded from checkpoints/{item.restored_from.incarnation}/{item.restored_from.step}, "
                    f"{resharded} mesh {mesh}"
                )
            case records.FirstStep():
                self._first_step = item
                return None
            case records.Incident():
                alive = f"alive {item.alive}/{item.total}"
                return f"worker failure: {item.cause} after step {item.step}, {alive}: {item.message}"
            case records.Recovered():
                return recovered_line(item)
            case records.CheckpointCommitted():
                return (
                    f"checkpoint of step {item.step} committed: {item.nbytes / 1e6:.1f} MB, "
                    f"saved in {item.save_seconds:.1f} s, verified in {item.verify_seconds:.1f} s"
                )
            case records.CheckpointFailed():
                return f"checkpoint of step {item.step} FAILED: {item.reason}"
            case records.CheckpointQuarantined():
                return f"checkpoint of step {item.step} set aside: {item.reason}"
            case records.Waiting():
                return f"waiting for capacity: {item.reason}"
            case records.StopRequested():
                return f"stopping at the next step boundary ({item.reason})"
            case _:
                return None

    def _resumed_line(self, item: MetricsRecord) -> str | None:
        if self._first_step is None or self._first_step.step != item.step or self._restored is None:
            return None
        self._first_step = None
        if self._restored.tier == "init":
            return f"first step done, loss {item.loss:.4f}"
        return f"resumed from step {self._restored.step}: step {item.step}, loss {item.loss:.4f}"


def recovered_line(item: records.Recovered) -> str:
    """One line per incident or planned resize."""
    what = f"{', '.join(item.hosts)} {'left' if item.planned else 'lost'}" if item.hosts else item.cause
    if item.planned and item.to_hosts > item.from_hosts:
        what = "grew"
    elif item.planned and not item.hosts:
        what = "shrank" if item.to_hosts < item.from_hosts else "planned restart"
    elif not item.planned and item.cause != "host_lost":
        what = f"{item.cause} on {', '.join(item.hosts)}"
    return (
        f"{what} at step {item.step} · {item.from_hosts}→{item.to_hosts} hosts · "
        f"resumed at step {item.resumed_from} after {item.down_seconds:.1f} s"
    )


def held_line(num_hosts: int, reason: str, until: float | None) -> str:
    """Why a group stays as it is. `until` is in seconds since the epoch."""
    end = "" if until is None else f" until {datetime.datetime.fromtimestamp(until).astimezone():%H:%M:%S}"
    return f"not growing to {hosts(num_hosts)}{end}: {reason}"


def hosts(number: int) -> str:
    return f"{number} host" if number == 1 else f"{number} hosts"
