"""Run directories made of the real records, written through the real store, on a clock of their own.

The verbs tell what happens to a run; what a controller would write follows from them. Some of them do damage.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.config import parse_config
from trainer.planning.topology import MemoryEstimate, MeshShape, TopologyPlan
from trainer.records import (
    Cause,
    CheckpointCommitted,
    CheckpointSaving,
    CommitRecord,
    DataRecord,
    Event,
    FileRecord,
    FirstStep,
    GroupEnded,
    GroupReady,
    GroupStarting,
    Incident,
    LeaseRecord,
    MetricsRecord,
    PhaseName,
    ProcessIdentity,
    QuarantineRecord,
    Recovered,
    RestoredFrom,
    RollbackRecord,
    RolledBack,
    RunEnded,
    RunOpened,
    RunRecord,
    SegmentRecord,
    Waiting,
    WorkerPhase,
    to_json,
)
from trainer.store import LocalStore

START = 1_700_000_000.0
TOKENS_PER_ROW = 128
# Durations are sums of powers of two, so that tests can compare sums of them exactly.
PHASES: dict[PhaseName, float] = {
    "import": 0.25,
    "rendezvous": 0.125,
    "devices": 0.125,
    "restore": 0.25,
    "data": 0.125,
    "trace": 0.25,
    "compile": 0.5,
}


def topology_of(hosts: tuple[str, ...], *, global_batch_size: int = 16) -> TopologyPlan:
    rows = math.ceil(global_batch_size / (2 * len(hosts))) * 2 * len(hosts)
    return TopologyPlan(
        hosts=hosts,
        devices_per_host=2,
        hosts_per_slice=1,
        mesh=MeshShape(dcn_data=len(hosts), dcn_fsdp=1, ici_fsdp=2, ici_tensor=1),
        global_batch_size=global_batch_size,
        num_microbatches=1,
        rows_per_microbatch=rows,
        remat="none",
        memory=MemoryEstimate(
            params_bytes=40_000_000,
            optimizer_bytes=80_000_000,
            gradients_bytes=40_000_000,
            activations_bytes=25_000_000,
            limit_bytes=2_000_000_000,
        ),
        step_seconds_guess=0.25,
        notes=(f"{rows - global_batch_size} of {rows} rows are padding",) if rows > global_batch_size else (),
    )


def host_names(count: int) -> tuple[str, ...]:
    return tuple(f"host-{index}" for index in range(count))


class RunDirectoryBuilder:
    """Plays a run into `root`. `clock` is the wall time of what happens next; tests may move it."""

    def __init__(self, root: Path, *, steps: int = 300, noise: float = 0.0, **config: Any) -> None:
        self.store = LocalStore(root)
        self.clock = START
        self.step = 0
        self.incarnation = 0
        self.hosts: tuple[str, ...] = ()
        self.controller = "controller-1"
        self._steps = steps
        self._random = np.random.default_rng(0)
        self._noise = noise
        self._journal_parts: dict[int, int] = {}
        self._segments = 0
        self._rollbacks = 0
        self._segment_started = self.clock
        self._segment_start_step = 0
        self._restored_from = RestoredFrom(tier="init", step=0)
        self._last_step_ended = self.clock
        self._config = parse_config({"run_name": "quickstart", "steps": steps, **config})

    # --- what happens to a run

    def open(self, *, resumed: bool = False) -> None:
        if not resumed:
            record = RunRecord(
                config=self._config,
                job_fingerprint="f00d",
                data=DataRecord(
                    description="the Python standard library's own sources, as bytes",
                    content_hash="crc32c:1f2e3d4c",
                    num_samples=80_000,
                    baseline_loss=4.61,
                ),
                tokens_per_row=TOKENS_PER_ROW,
                created=self.clock,
            )
            self.store.write("run.json", to_json(record, indent=2))
        self.write_lease(holder=self.controller)
        self.journal(RunOpened(**self.stamp(), resumed=resumed, newest_commit=None, steps=self._steps))
        self.clock += 0.5

    def start_group(
        self, num_hosts: int, *, cause: Cause | Literal["start"] = "start", from_step: int = 0, reach_step: bool = True
    ) -> None:
        """Form the next incarnation from the state of `from_step`. Its first step is `train`'s."""
        previous, self.hosts = self.hosts, host_names(num_hosts)
        self.incarnation += 1
        self.journal(
            GroupStarting(**self.stamp(), cause=cause, topology=topology_of(self.hosts), previous_hosts=previous)
        )
        for phase, seconds in PHASES.items():
            self.clock += seconds
            for index, host_id in enumerate(self.hosts):
                slower = seconds if index == 0 else seconds / 2
                event = WorkerPhase(**self.stamp(), host_id=host_id, process_index=index, phase=phase, seconds=slower)
                self.journal(event)
        self._restored_from = (
            RestoredFrom(tier="checkpoint", step=from_step, incarnation=max(1, self.incarnation - 1))
            if from_step
            else RestoredFrom(tier="init", step=0)
        )
        if reach_step:
            self.journal(GroupReady(**self.stamp(), restored_from=self._restored_from))
        self.step = self._segment_start_step = from_step
        self._segment_started = self.clock

    def train(self, until_step: int, *, step_seconds: float | None = None) -> None:
        """Finish steps up to this one. The first of a group also says so in the journal."""
        seconds = step_seconds if step_seconds is not None else 1.0 / len(self.hosts)
        first = self.step + 1
        began = self.step == self._segment_start_step and self._restored_from.step == self.step
        lines = []
        for step in range(first, until_step + 1):
            this_step = seconds * float(np.exp(self._noise * self._random.normal())) if self._noise else seconds
            self.clock += this_step
            self.step = step
            lines.append(to_json(self.metrics_line(step, step_seconds=this_step)))
            if began and step == first:
                self.journal(FirstStep(**self.stamp(), step=step))
        with self.store.open_part(f"metrics/{self.incarnation}/{first}.jsonl") as part:
            part.append(b"".join(lines))
        self._last_step_ended = self.clock

    def metrics_line(self, step: int, *, step_seconds: float) -> MetricsRecord:
        loss = 2.3 + 3.4 * math.exp(-step / 45) + 0.06 * float(self._random.normal()) * bool(self._noise)
        return MetricsRecord(
            step=step,
            loss=loss,
            learning_rate=3e-3,
            samples=16,
            tokens=16 * TOKENS_PER_ROW,
            sample_digest=f"{step:016x}",
            step_seconds=step_seconds,
        )

    def checkpoint(self, *, blocking_seconds: float = 0.125) -> None:
        """Save and commit the present step. The save holds up the loop only for `blocking_seconds`."""
        self.journal(CheckpointSaving(**self.stamp(), step=self.step, blocking_seconds=blocking_seconds))
        name = f"{self.step}.{self.incarnation}.json"
        commit = CommitRecord(
            step=self.step,
            incarnation=self.incarnation,
            path=f"checkpoints/{self.incarnation}/{self.step}",
            files=(FileRecord(path="params/0", size=4096, crc32c="00000000"),),
            committed=self.clock,
        )
        self.store.write(f"commits/{name}", to_json(commit))
        self.journal(
            CheckpointCommitted(**self.stamp(), step=self.step, nbytes=4096, save_seconds=0.25, verify_seconds=0.125)
        )
        self.end_segment("completed")

    def end_segment(self, cause: Cause) -> None:
        self._segments += 1
        record = SegmentRecord(
            index=self._segments,
            incarnation=self.incarnation,
            cause=cause,
            start_step=self._segment_start_step,
            end_step=self.step,
            first_sample=self._segment_start_step * 16,
            num_samples=(self.step - self._segment_start_step) * 16,
            topology=topology_of(self.hosts),
            restored_from=self._restored_from,
            started=self._segment_started,
            ended=self.clock,
        )
        self.store.write(f"segments/{self._segments}.json", to_json(record))
        self._segment_start_step, self._segment_started = self.step, self.clock

    def lose_host(self, host_id: str, *, detected_seconds: float = 0.25) -> None:
        self.clock += detected_seconds
        self.journal(
            Incident(
                **self.stamp(),
                cause="host_lost",
                host_ids=(host_id,),
                step=self.step,
                alive=len(self.hosts) - 1,
                total=len(self.hosts),
                message=f"the agent of {host_id} closed its connection",
                detected_seconds=detected_seconds,
            )
        )
        self.end_group("host_lost")

    def end_group(self, cause: Cause, *, seconds: float = 0.25) -> None:
        self.clock += seconds
        self.journal(GroupEnded(**self.stamp(), cause=cause, step=self.step))
        if self.step > self._segment_start_step:
            self.end_segment(cause)
        self.clock += 0.25

    def recovered(
        self, *, cause: Cause, planned: bool, from_hosts: int, step: int, resumed_from: int, down_seconds: float
    ) -> None:
        self.journal(
            Recovered(
                **self.stamp(),
                cause=cause,
                planned=planned,
                from_hosts=from_hosts,
                to_hosts=len(self.hosts),
                step=step,
                resumed_from=resumed_from,
                down_seconds=down_seconds,
                phases={"detect": 0.25, "stop": 0.25, "plan": 0.001, **dict(PHASES.items()), "first_step": 0.25},
            )
        )

    def continue_on(self, num_hosts: int, *, cause: Cause, planned: bool, from_step: int) -> None:
        """Form the next group, train its first step and say that the interruption is over."""
        from_hosts, last_step, down_since = len(self.hosts), self.step, self._last_step_ended
        self.start_group(num_hosts, cause=cause, from_step=from_step)
        self.train(from_step + 1)
        self.recovered(
            cause=cause,
            planned=planned,
            from_hosts=from_hosts,
            step=last_step,
            resumed_from=from_step,
            down_seconds=self.clock - down_since,
        )

    def wait_for_capacity(self, seconds: float) -> None:
        self.journal(Waiting(**self.stamp(), usable=0, needed=1, reason="0 of at least 1 hosts are usable"))
        self.clock += seconds

    def end(self, outcome: Literal["complete", "stopped", "failed"], *, cause: Cause, message: str = "") -> None:
        self.journal(RunEnded(**self.stamp(), outcome=outcome, cause=cause, step=self.step, message=message))
        self.write_lease(holder=None)

    def lose_controller(self, *, seconds: float) -> None:
        """The controller dies with its workers; a new one opens the run after `seconds`."""
        self.clock += seconds
        self.controller = "controller-2"
        self.open(resumed=True)

    def roll_back(self, to_step: int, reason: str = "") -> None:
        record = RollbackRecord(
            to_step=to_step, from_step=self.step, after_incarnation=self.incarnation, reason=reason, time=self.clock
        )
        self._rollbacks += 1
        self.store.write(f"rollbacks/{self._rollbacks}.json", to_json(record))
        self.journal(RolledBack(**self.stamp(), to_step=to_step, from_step=self.step, reason=reason))

    # --- damage

    def tear_last_line(self, key: str) -> None:
        path = self.store.path(key)
        path.write_bytes(path.read_bytes()[:-20])

    def damage_line(self, key: str, number: int) -> None:
        path = self.store.path(key)
        lines = path.read_bytes().split(b"\n")
        lines[number - 1] = lines[number - 1][:10] + b"\x00\xff"
        path.write_bytes(b"\n".join(lines))

    def break_json(self, key: str) -> None:
        path = self.store.path(key)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def journal_unknown_event(self) -> None:
        self._append_to_journal(b'{"event":"teleported","time":1.0,"monotonic":1.0,"incarnation":1,"to":"mars"}\n')

    def quarantine(self, step: int, incarnation: int, reason: str = "params/0 has crc32c deadbeef") -> None:
        record = QuarantineRecord(step=step, incarnation=incarnation, reason=reason, found=self.clock)
        self.store.write(f"quarantine/{step}.{incarnation}.json", to_json(record))

    # --- records

    def stamp(self) -> dict[str, Any]:
        return {
            "time": self.clock,
            "monotonic": self.clock - START,
            "incarnation": self.incarnation,
            "controller": self.controller,
        }

    def journal(self, event: Event) -> None:
        self._append_to_journal(to_json(event))

    def write_lease(self, *, holder: str | None) -> None:
        record = LeaseRecord(
            holder=holder,
            renewals=1,
            incarnation=self.incarnation,
            host_name="workstation",
            process=ProcessIdentity(boot_id="b", pid=1, start_time=START),
            lease_seconds=10,
        )
        self.store.write("lease.json", to_json(record))

    def _append_to_journal(self, line: bytes) -> None:
        with self.store.open_part(f"journal/{self.incarnation}/1.jsonl") as part:
            part.append(line)


def play_disturbed_run(root: Path, *, noise: float = 0.08) -> RunDirectoryBuilder:
    """300 steps on 4 hosts; host-2 is lost at step 118, 3 hosts go on, a fourth joins at 150, host-1 is lost at 220."""
    run = RunDirectoryBuilder(root, noise=noise)
    run.open()
    run.start_group(4)
    run.train(50)
    run.checkpoint()
    run.train(100)
    run.checkpoint()
    run.train(118)
    run.lose_host("host-2")
    run.continue_on(3, cause="host_lost", planned=False, from_step=100)
    run.train(150)
    run.checkpoint()
    run.end_group("drained")
    run.continue_on(4, cause="drained", planned=True, from_step=150)
    run.train(200)
    run.checkpoint()
    run.train(220)
    run.lose_host("host-1")
    run.continue_on(3, cause="host_lost", planned=False, from_step=200)
    run.train(250)
    run.checkpoint()
    run.train(300)
    run.checkpoint()
    run.end_group("completed")
    run.end("complete", cause="completed")
    return run
