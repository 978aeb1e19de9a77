"""Messages between the planes: controller <-> host agent <-> worker, and the keeper of a pool between the first two.

JSON, one message per WebSocket frame or line.

    controller ── WebSocket ──> host agent      StartWorker, ToWorker, KillWorkers, Contact, Leave
    host agent ── WebSocket ──> controller      Hello, WorkerStarted, FromWorker, WorkerExited
    keeper     ── WebSocket ──> host agent      Let, Contact, Leave
    host agent ── WebSocket ──> keeper          Hello, LetTo
    controller ── WebSocket ──> keeper          Acquire, Release, Expel
    keeper     ── WebSocket ──> controller      Acquired, Refused, HostUpdate, Ended
    host agent ── stdin line ─> worker          Assignment, Coordinator, Grant, Stop, Exit
    worker     ── pipe line ──> host agent      Phase, CoordinatorListening, Ready, Steps, Saving, Saved, SaveFailed,
                                                Stopped, Failed

The agent forwards worker messages without reading them. Every message of and to a worker travels in an envelope with
its incarnation, so that what a stale process says is dropped. No pickle: a socket never carries code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trainer.config import EngineConfig, RunConfig
from trainer.planning.topology import TopologyPlan
from trainer.records import MetricsRecord, PhaseName, RestoredFrom


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


# --- to and from workers -----------------------------------------------------------------------------------------


class Assignment(Message):
    """Everything a worker needs to become process `process_index` of its incarnation. First message it gets."""

    type: Literal["assignment"] = "assignment"
    incarnation: int
    config: RunConfig
    topology: TopologyPlan
    host_id: str
    process_index: int
    run_directory: str
    restore: RestoredFrom
    restore_path: str | None
    """Of the checkpoint, relative to the run directory; None: initialize from the seed."""


class Coordinator(Message):
    """Where process 0 listens. Sent to the other processes only once it does."""

    type: Literal["coordinator"] = "coordinator"
    address: str


class Grant(Message):
    """The group may train up to this step."""

    type: Literal["grant"] = "grant"
    until_step: int


class Stop(Message):
    """Stop at the next common step boundary and save."""

    type: Literal["stop"] = "stop"


class Exit(Message):
    """Leave now; everything is saved. Process 0 gets it last, because it serves the others' coordinator."""

    type: Literal["exit"] = "exit"


ToWorkerMessage = Annotated[Assignment | Coordinator | Grant | Stop | Exit, Field(discriminator="type")]
TO_WORKER: TypeAdapter[ToWorkerMessage] = TypeAdapter(ToWorkerMessage)


class Phase(Message):
    type: Literal["phase"] = "phase"
    phase: PhaseName
    seconds: float


class CoordinatorListening(Message):
    type: Literal["coordinator_listening"] = "coordinator_listening"
    address: str


class Ready(Message):
    """State restored, step compiled."""

    type: Literal["ready"] = "ready"
    step: int


class Steps(Message):
    """Finished steps, from process 0 alone, in order."""

    type: Literal["steps"] = "steps"
    metrics: tuple[MetricsRecord, ...]


class Saving(Message):
    """An asynchronous save of `step` has begun; the loop was held up for `blocking_seconds`."""

    type: Literal["saving"] = "saving"
    step: int
    blocking_seconds: float


class Saved(Message):
    """This process knows that the checkpoint of `step` is complete in storage."""

    type: Literal["saved"] = "saved"
    step: int
    seconds: float


class SaveFailed(Message):
    type: Literal["save_failed"] = "save_failed"
    step: int
    reason: str


class Stopped(Message):
    """The loop ended after `step`, and that step's checkpoint is complete (or failed, see SaveFailed)."""

    type: Literal["stopped"] = "stopped"
    step: int


class Failed(Message):
    """A worker's own record of its failure, written before it exits."""

    type: Literal["failed"] = "failed"
    kind: Literal["user", "data", "peer", "memory", "storage", "system"]
    """`peer`: only the echo of another worker's end, seen through a collective."""
    phase: str
    error: str
    """Exception type and message, one line."""
    traceback: str


FromWorkerMessage = Annotated[
    Phase | CoordinatorListening | Ready | Steps | Saving | Saved | SaveFailed | Stopped | Failed,
    Field(discriminator="type"),
]


# --- between controller and host agent ----------------------------------------------------------------------------


class StartWorker(Message):
    type: Literal["start_worker"] = "start_worker"
    incarnation: int
    assignment: Assignment
    environment: dict[str, str]
    """Variables that shape the backend (XLA_FLAGS, JAX_PLATFORMS, …) on top of the agent's own."""


class ToWorker(Message):
    type: Literal["to_worker"] = "to_worker"
    incarnation: int
    message: ToWorkerMessage


class KillWorkers(Message):
    """SIGKILL every worker of this incarnation and older; answered by WorkerExited for each."""

    type: Literal["kill_workers"] = "kill_workers"
    incarnation: int


class Contact(Message):
    """The controller lives. An agent that misses these for `contact_timeout_seconds` ends its host."""

    type: Literal["contact"] = "contact"


class Leave(Message):
    """The host is withdrawn: kill the workers, remove the host's memory, exit."""

    type: Literal["leave"] = "leave"


class Acquire(Message):
    """Asks for a tenancy. Its sender holds the run's lease: an earlier tenancy of that run ends by it.

    Sent again after the connection broke, it continues the tenancy.
    """

    type: Literal["acquire"] = "acquire"
    tenancy: str
    """The controller's id."""
    run: str
    min_hosts: int
    max_hosts: int
    engine: EngineConfig
    """What the run was planned for; the pool's hosts must be such hosts."""


class Let(Message):
    """From the keeper of a pool: who commands this host from now on. All workers there are killed first."""

    type: Literal["let"] = "let"
    to: Acquire | None
    """None: nobody."""
    token: str
    """What the tenant will show."""
    contact_timeout_seconds: float
    """The agent kills the workers of a tenant that it has not heard from for this long."""


ToAgentMessage = Annotated[StartWorker | ToWorker | KillWorkers | Contact | Leave | Let, Field(discriminator="type")]
TO_AGENT: TypeAdapter[ToAgentMessage] = TypeAdapter(ToAgentMessage)


class Hello(Message):
    type: Literal["hello"] = "hello"
    host_id: str
    pid: int
    process_group: int


class LetTo(Message):
    """Answers `Let`: no worker of an earlier tenancy is left, and only this one is obeyed."""

    type: Literal["let_to"] = "let_to"
    tenancy: str | None


class WorkerStarted(Message):
    type: Literal["worker_started"] = "worker_started"
    incarnation: int
    pid: int


class FromWorker(Message):
    type: Literal["from_worker"] = "from_worker"
    incarnation: int
    message: FromWorkerMessage


class WorkerExited(Message):
    type: Literal["worker_exited"] = "worker_exited"
    incarnation: int
    pid: int
    returncode: int
    """Negative: the number of the signal that ended it."""
    output_tail: str


FromAgentMessage = Annotated[Hello | LetTo | WorkerStarted | FromWorker | WorkerExited, Field(discriminator="type")]
FROM_AGENT: TypeAdapter[FromAgentMessage] = TypeAdapter(FromAgentMessage)


# --- between the controller of a run and the keeper of a pool ------------------------------------------------------


class Release(Message):
    """A host that was leaving is no longer needed."""

    type: Literal["release"] = "release"
    host_id: str


class Expel(Message):
    """A host does not obey or answer: end it. Its replacement stays in the tenancy."""

    type: Literal["expel"] = "expel"
    host_id: str
    pid: int
    """Of its agent, so that its replacement is not meant."""


ToKeeperMessage = Annotated[Acquire | Release | Expel, Field(discriminator="type")]
TO_KEEPER: TypeAdapter[ToKeeperMessage] = TypeAdapter(ToKeeperMessage)


class Acquired(Message):
    """The tenancy exists; a `HostUpdate` follows for each of its hosts that can be used."""

    type: Literal["acquired"] = "acquired"
    hosts: tuple[str, ...]
    """All that it has now; what the controller knew of others is void."""


class Refused(Message):
    """There will be no tenancy."""

    type: Literal["refused"] = "refused"
    reason: str


class AgentAddress(Message):
    """Where the agent of a host listens, and what shows it that the tenant is calling."""

    url: str
    token: str
    pid: int
    process_group: int
    contact_timeout_seconds: float
    environment: dict[str, str]
    """Of workers on this host."""


class HostUpdate(Message):
    """A host of the tenancy has changed; one that was never named before has joined it."""

    type: Literal["host_update"] = "host_update"
    host_id: str
    state: Literal["starting", "ready", "lost", "leaving", "withdrawn"]
    """`withdrawn`: it has left the tenancy."""
    reason: str = ""
    agent: AgentAddress | None = None
    """With `ready`, unless the tenant is connected to this agent already."""


class Ended(Message):
    """The tenancy is over; the hosts are somebody else's."""

    type: Literal["ended"] = "ended"
    reason: str


FromKeeperMessage = Annotated[Acquired | Refused | HostUpdate | Ended, Field(discriminator="type")]
FROM_KEEPER: TypeAdapter[FromKeeperMessage] = TypeAdapter(FromKeeperMessage)


# --- what a pool says of itself, to flows and shells ---------------------------------------------------------------


class HostView(Message):
    host_id: str
    state: Literal["starting", "ready", "lost", "leaving", "withdrawn"]
    tenancy: str | None
    pid: int | None
    process_group: int | None


class TenancyView(Message):
    tenancy: str
    run: str
    """The run directory."""
    since: float
    """Seconds since the epoch."""
    min_hosts: int
    max_hosts: int
    hosts: tuple[str, ...]


class PoolView(Message):
    """A pool at a moment."""

    pool: str
    version: int
    """Rises with every change."""
    time: float
    """Of the newest change, seconds since the epoch."""
    offered: int
    source: Literal["local", "trace", "command"]
    """Who says how many: a person, or what the pool follows."""
    price_per_host_hour: float | None
    """None: unknown."""
    free: tuple[str, ...]
    """Hosts that are ready and in no tenancy."""
    hosts: tuple[HostView, ...]
    tenancies: tuple[TenancyView, ...]
    """Oldest first."""
    hosts_per_slice: int


class Enlarge(Message):
    """Give free hosts to a tenancy."""

    key: str
    """An order with a key that was carried out already gets the same answer and changes nothing."""
    tenancy: str
    hosts: tuple[str, ...]


def encode(message: Message) -> str:
    """One line of JSON without the newline."""
    return message.model_dump_json()


def json_line(message: Message) -> bytes:
    return message.model_dump_json().encode() + b"\n"
