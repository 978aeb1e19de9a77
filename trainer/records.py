"""The records of a run directory: its public contract, described in docs/run-directory.md.

Every file that Shoal itself writes there is one of these models, as JSON or as JSON lines. Readers (status, report,
verify) and writers (the controller) share them. `SCHEMA_VERSION` rises when an old reader would misread a new file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trainer.config import RunConfig
from trainer.planning.topology import TopologyPlan

SCHEMA_VERSION = 1

# Why a worker group or a segment ended.
Cause = Literal[
    "completed",
    "drained",
    "host_lost",
    "worker_crashed",
    "worker_stuck",
    "out_of_memory",
    "user_error",
    "data_error",
    "checkpoint_error",
    "storage_error",
    "no_capacity",
    "lease_lost",
    "stopped",
]
# Start-up of a worker, in order.
PhaseName = Literal[
    "import", "assignment", "rendezvous", "devices", "restore", "data", "trace", "compile", "first_step"
]
# Causes that are planned: the state is saved at a step boundary first, and no step is lost.
PLANNED_CAUSES: frozenset[Cause] = frozenset({"completed", "drained", "stopped"})


class Record(BaseModel):
    """Base of all records: frozen. Unknown fields are ignored, so that an older reader can read newer files."""

    # A loss may be NaN or infinite, and that is worth recording: JSON's extension for it reads back.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")


class ProcessIdentity(Record):
    """A process that a number alone would not identify after a reboot or a pid wrap-around."""

    boot_id: str
    pid: int
    start_time: float
    """Seconds since the epoch, as psutil reports it."""


class DataRecord(Record):
    description: str
    content_hash: str
    num_samples: int
    baseline_loss: float | None


class RunRecord(Record):
    """run.json"""

    schema_version: int = SCHEMA_VERSION
    config: RunConfig
    """As first submitted, with `optimizer.decay_steps` resolved."""
    job_fingerprint: str
    data: DataRecord
    tokens_per_row: int
    created: float
    """Seconds since the epoch."""


class LeaseRecord(Record):
    """lease.json: who may command workers and commit checkpoints."""

    holder: str | None
    """None: released."""
    renewals: int
    """Rises with each renewal. Expiry is judged by this number standing still, never by comparing two clocks."""
    incarnation: int
    """Highest incarnation ever started in this run."""
    host_name: str
    process: ProcessIdentity
    lease_seconds: float
    """A holder that has not renewed for this long, as the observer's own clock measures it, has lost the lease."""
    started_by: str | None = None
    """What the holder trains for, for example the id of a Prefect flow run. None: nobody said."""


class FileRecord(Record):
    path: str
    """Relative to the checkpoint's directory."""
    size: int
    crc32c: str
    """Eight hex digits."""


class CommitRecord(Record):
    """commits/<step>.<incarnation>.json: this checkpoint is complete, verified and usable."""

    schema_version: int = SCHEMA_VERSION
    step: int
    incarnation: int
    path: str
    """Relative to the run directory."""
    files: tuple[FileRecord, ...]
    committed: float


class QuarantineRecord(Record):
    """quarantine/<step>.<incarnation>.json: why a committed step is not to be used."""

    step: int
    incarnation: int
    reason: str
    found: float


class RollbackRecord(Record):
    """rollbacks/<n>.json: a person gave up what the run had trained beyond a step. Nothing was deleted.

    Whatever incarnations up to `after_incarnation` committed or recorded beyond `to_step` is off the line of history,
    for good; later incarnations train those steps anew.
    """

    to_step: int
    """A committed step: the run goes on from here."""
    from_step: int
    """The newest committed step before."""
    after_incarnation: int
    """The newest one at that time."""
    reason: str
    time: float

    def hides(self, step: int, incarnation: int) -> bool:
        """Whether this rollback took that step of that incarnation off the line of history."""
        return step > self.to_step and incarnation <= self.after_incarnation


class MetricsRecord(Record):
    """One line of metrics/<incarnation>/<first_step>.jsonl."""

    step: int
    """1 for the first optimizer step."""
    loss: float
    learning_rate: float
    samples: int
    """Rows fed with weight > 0."""
    tokens: int
    sample_digest: str
    """Sixteen hex digits; see `trainer.compute.data`."""
    step_seconds: float
    """From the end of the previous step of this group to the end of this one."""


class RestoredFrom(Record):
    tier: Literal["init", "checkpoint"]
    step: int
    incarnation: int | None = None
    """Of the checkpoint's writer."""


class SegmentRecord(Record):
    """segments/<n>.json: one segment as it ended, whole or cut short."""

    index: int
    incarnation: int
    cause: Cause
    start_step: int
    """Steps `start_step + 1` … `end_step` were trained."""
    end_step: int
    first_sample: int
    """Position in the run's sample order; the samples are `first_sample` … `first_sample + num_samples - 1`."""
    num_samples: int
    topology: TopologyPlan
    restored_from: RestoredFrom
    started: float
    ended: float


# --- journal -----------------------------------------------------------------------------------------------------


class Event(Record):
    """Fields of every journal line. `monotonic` compares only between events of one controller process."""

    time: float
    monotonic: float
    incarnation: int
    controller: str = ""
    """Id of the controller that wrote the event; also the lease's holder."""


class RunOpened(Event):
    event: Literal["run_opened"] = "run_opened"
    resumed: bool
    newest_commit: int | None
    steps: int


class HostChanged(Event):
    event: Literal["host_changed"] = "host_changed"
    host_id: str
    state: Literal["starting", "ready", "lost", "withdrawn"]
    reason: str = ""


class CapacityChanged(Event):
    event: Literal["capacity_changed"] = "capacity_changed"
    offered: int
    usable: int
    source: str = "local"
    """Who changed it: `local` (`shoal capacity`), `trace` or `command`."""
    price_per_host_hour: float | None = None
    """As the command named it; None: unknown."""


class GrowHeld(Event):
    """A living group could be larger but goes on as it is. Once for each rule and size, however often it is looked at.

    It ends with the next `group_ended`, when the larger capacity goes away, or when another rule takes over.
    """

    event: Literal["grow_held"] = "grow_held"
    num_hosts: int
    """Of the larger group."""
    rule: Literal["stable", "dwell", "payback"]
    """`elastic.grow_after_stable_seconds`, `elastic.min_dwell_seconds` or `elastic.grow_payback_seconds`."""
    reason: str
    until: float | None
    """Seconds since the epoch; None: time alone does not end it."""


class GroupStarting(Event):
    event: Literal["group_starting"] = "group_starting"
    cause: Cause | Literal["start"]
    """Why a new group is needed: the cause that ended the last one, or `start`."""
    topology: TopologyPlan
    previous_hosts: tuple[str, ...] = ()


class WorkerPhase(Event):
    event: Literal["worker_phase"] = "worker_phase"
    host_id: str
    process_index: int
    phase: PhaseName
    seconds: float


class GroupReady(Event):
    """Every worker of the group has restored its state and compiled; the next thing is a step."""

    event: Literal["group_ready"] = "group_ready"
    restored_from: RestoredFrom


class FirstStep(Event):
    event: Literal["first_step"] = "first_step"
    step: int


class GroupEnded(Event):
    event: Literal["group_ended"] = "group_ended"
    cause: Cause
    step: int
    """Last finished step."""
    message: str = ""


class Incident(Event):
    """An unplanned end of a worker group, counted once however many workers it took down."""

    event: Literal["incident"] = "incident"
    cause: Cause
    host_ids: tuple[str, ...]
    step: int
    """Last finished step when it happened."""
    alive: int
    """Hosts of the group that are still alive."""
    total: int
    message: str
    detected_seconds: float
    """From the first sign to the verdict."""
    output_tail: str = ""


class Recovered(Event):
    """Closes an incident or a planned resize: the first step of the next group is finished."""

    event: Literal["recovered"] = "recovered"
    cause: Cause
    planned: bool
    from_hosts: int
    to_hosts: int
    step: int
    """Last step of the old group."""
    resumed_from: int
    """Step of the state that the new group started from. `step - resumed_from` steps were lost."""
    down_seconds: float
    """From the old group's last finished step to the new group's first finished one."""
    phases: dict[str, float]
    """Seconds of detect or drain, stop, plan, and of each start-up phase on the worker that took longest for it."""
    hosts: tuple[str, ...] = ()
    """Lost or changed hosts."""


class SegmentStarted(Event):
    event: Literal["segment_started"] = "segment_started"
    index: int
    start_step: int
    until_step: int


class SegmentEnded(Event):
    event: Literal["segment_ended"] = "segment_ended"
    index: int
    cause: Cause
    start_step: int
    end_step: int


class CheckpointSaving(Event):
    event: Literal["checkpoint_saving"] = "checkpoint_saving"
    step: int
    blocking_seconds: float


class CheckpointCommitted(Event):
    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int
    nbytes: int
    save_seconds: float
    verify_seconds: float


class CheckpointFailed(Event):
    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: int
    reason: str


class CheckpointQuarantined(Event):
    event: Literal["checkpoint_quarantined"] = "checkpoint_quarantined"
    step: int
    of_incarnation: int
    reason: str


class CheckpointDeleted(Event):
    event: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    step: int
    of_incarnation: int


class RolledBack(Event):
    """See `RollbackRecord`. Nobody trained the run meanwhile."""

    event: Literal["rolled_back"] = "rolled_back"
    to_step: int
    from_step: int
    reason: str


class Waiting(Event):
    event: Literal["waiting"] = "waiting"
    usable: int
    needed: int
    reason: str


class StopRequested(Event):
    event: Literal["stop_requested"] = "stop_requested"
    reason: str


class RunEnded(Event):
    event: Literal["run_ended"] = "run_ended"
    outcome: Literal["complete", "stopped", "failed"]
    cause: Cause
    step: int
    message: str = ""


JournalEvent = Annotated[
    RunOpened
    | HostChanged
    | CapacityChanged
    | GrowHeld
    | GroupStarting
    | WorkerPhase
    | GroupReady
    | FirstStep
    | GroupEnded
    | Incident
    | Recovered
    | SegmentStarted
    | SegmentEnded
    | CheckpointSaving
    | CheckpointCommitted
    | CheckpointFailed
    | CheckpointQuarantined
    | CheckpointDeleted
    | RolledBack
    | Waiting
    | StopRequested
    | RunEnded,
    Field(discriminator="event"),
]
JOURNAL_EVENT: TypeAdapter[JournalEvent] = TypeAdapter(JournalEvent)


def parse_event(line: str | bytes) -> JournalEvent | None:
    """One journal line, or None for an event kind that this version does not know."""
    try:
        return JOURNAL_EVENT.validate_json(line)
    except ValueError:
        return None


def to_json(record: BaseModel, *, indent: int | None = None) -> bytes:
    return record.model_dump_json(indent=indent).encode() + b"\n"
