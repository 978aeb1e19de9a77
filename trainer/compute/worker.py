"""A worker: one training process of one incarnation, started and ended by its host agent.

    python -P -m trainer.compute.worker AGENT_PID EVENTS_FD

Orders come as lines on stdin, what it has to say goes as lines to EVENTS_FD (see `trainer.wire`). It is disposable:
whatever goes wrong, it writes down what it knows and ends; nothing is mended in here.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer import wire
from trainer.errors import DataError, ShoalError, UserCodeError
from trainer.processes import die_with_parent
from trainer.records import MetricsRecord

if TYPE_CHECKING:
    from trainer.compute.loop import Orders

# What a collective or the coordination service says when another process is gone. gloo raises ValueError, JAX's own
# runtime JaxRuntimeError; neither has a type of its own for it.
_PEER_TEXT = re.compile(
    r"gloo|connection (closed|reset|refused)|coordination service|socket closed|UNAVAILABLE|heartbeat|barrier|"
    r"DEADLINE_EXCEEDED|broken pipe|peer|another task",
    re.IGNORECASE,
)
_MEMORY_TEXT = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc", re.IGNORECASE)


class Channel:
    """What this worker has to say, a line a message, from any of its threads."""

    def __init__(self, events_fd: int) -> None:
        self._fd = events_fd
        self._lock = threading.Lock()

    def send(self, message: wire.Message) -> None:
        data = wire.json_line(message)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class Timer:
    """Seconds of each start-up phase, reported as it ends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.phase = "import"
        self._started = time.monotonic()

    def done(self, phase: str, next_phase: str) -> None:
        now = time.monotonic()
        self._channel.send(wire.Phase.model_validate({"phase": phase, "seconds": now - self._started}))
        self.phase, self._started = next_phase, now


def main() -> NoReturn:
    die_with_parent(int(sys.argv[1]))
    # `-P` keeps the working directory off the front of the path; a user's own job module is found at its end.
    sys.path.append(os.getcwd())
    channel = Channel(int(sys.argv[2]))
    timer = Timer(channel)
    try:
        run(channel, timer)
    except BaseException as error:  # noqa: BLE001  the last thing a worker does is to say why it ends
        channel.send(describe_failure(error, timer.phase))
        # No clean-up: exit handlers of the runtime wait for peers that may be gone.
        os._exit(1)
    os._exit(0)


def run(channel: Channel, timer: Timer) -> None:
    # Imported late: `main` must be able to report that an import failed.
    from trainer.compute.checkpoint import Checkpointer, restore
    from trainer.compute.data import batches, load_batch, local_rows, sample_order, to_devices
    from trainer.compute.loop import Loop, Orders
    from trainer.compute.program import Program
    from trainer.jobs.registry import make_job

    timer.done("import", "assignment")
    assignment = wire.TO_WORKER.validate_json(sys.stdin.buffer.readline())
    assert isinstance(assignment, wire.Assignment)
    config, topology = assignment.config, assignment.topology

    orders = Orders(until_step=assignment.restore.step)  # no step is granted before all processes are ready
    coordinator: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read_orders, args=(orders, coordinator), name="orders", daemon=True).start()

    timer.done("assignment", "rendezvous")
    rendezvous(assignment, channel, coordinator)
    timer.done("rendezvous", "devices")
    job = make_job(config.job, config.job_params)
    program = Program.build(job, config, topology)
    timer.done("devices", "restore")
    if assignment.restore_path is None:
        state = program.init()
    else:
        state = restore(Path(assignment.run_directory) / assignment.restore_path, program.abstract_state)
    timer.done("restore", "data")
    source = job.data(config.data.path)
    rows = local_rows(program.batch_sharding, topology)
    sample = load_batch(sample_order(source, config.seed), assignment.restore.step + 1, topology, rows)
    host_batches = batches(source, config.seed, topology, rows, assignment.restore.step, config.steps)
    timer.done("data", "trace")
    lowered = program.lower(sample)
    timer.done("trace", "compile")
    train_step = lowered.compile()
    timer.done("compile", "first_step")

    checkpointer = Checkpointer(
        config.checkpoint,
        run_directory=Path(assignment.run_directory),
        incarnation=assignment.incarnation,
        timeout_seconds=config.elastic.step_timeout_seconds,
        report=channel.send,
    )
    channel.send(wire.Ready(step=assignment.restore.step))

    def report_step(metrics: MetricsRecord) -> None:
        if timer.phase == "first_step":
            timer.done("first_step", "step")
        if assignment.process_index == 0:
            channel.send(wire.Steps(metrics=(metrics,)))

    loop = Loop(
        train_step=train_step,
        batches=(to_devices(batch, program.batch_sharding, topology) for batch in host_batches),
        votes=program.votes,
        orders=orders,
        checkpointer=checkpointer,
        report_step=report_step,
        steps=config.steps,
        save_interval_steps=config.checkpoint.save_interval_steps,
        tokens_per_row=job.tokens_per_row,
    )
    stopped_at = loop.run(state, assignment.restore.step)
    channel.send(wire.Stopped(step=stopped_at))
    threading.Event().wait()  # until the order to exit: process 0 serves the others' coordinator


def read_orders(orders: Orders, coordinator: queue.SimpleQueue[str]) -> None:
    """Thread body: hand each order to whom it concerns. The end of stdin is the end of the agent."""
    for line in sys.stdin.buffer:
        match wire.TO_WORKER.validate_json(line):
            case wire.Grant() | wire.Stop() as order:
                orders.receive(order)
            case wire.Coordinator(address=address):
                coordinator.put(address)
            case wire.Exit():
                os._exit(0)
    os._exit(1)


def rendezvous(assignment: wire.Assignment, channel: Channel, coordinator: queue.SimpleQueue[str]) -> None:
    """Join the other processes through `jax.distributed`.

    A process that dials before the coordinator listens is made to wait over a second by the connection's back-off.
    So process 0 takes a fresh port, and its address is told to the others only once it accepts connections.
    """
    import jax

    if assignment.process_index == 0:
        address = f"127.0.0.1:{free_port()}"
        announcer = threading.Thread(target=announce_when_listening, args=(address, channel), daemon=True)
        announcer.start()
    else:
        address = coordinator.get()
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=assignment.topology.num_processes,
        process_id=assignment.process_index,
        # The controller's deadline on this phase comes first; JAX's own would abort the process without a word.
        initialization_timeout=int(assignment.config.elastic.start_timeout_seconds) + 60,
        cluster_detection_method="deactivate",
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def announce_when_listening(address: str, channel: Channel) -> None:
    host, port = address.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            time.sleep(0.002)
        else:
            channel.send(wire.CoordinatorListening(address=address))
            return


def describe_failure(error: BaseException, phase: str) -> wire.Failed:
    """Whose fault it is, by what was raised and where. An echo of another worker's end must never look like a cause."""
    text = f"{type(error).__name__}: {error}"
    kind: str
    if isinstance(error, DataError):
        kind = "data"
    elif isinstance(error, UserCodeError):
        kind = "user"
    elif isinstance(error, MemoryError) or _MEMORY_TEXT.search(text):
        kind = "memory"
    elif phase in ("rendezvous", "devices", "restore", "first_step", "step") and _PEER_TEXT.search(text):
        kind = "peer"
    elif phase in ("import", "assignment", "rendezvous") or isinstance(error, ShoalError):
        kind = "system"
    elif phase == "restore":
        kind = "storage"
    elif isinstance(error, OSError):
        kind = "data"
    elif type(error).__name__ == "JaxRuntimeError":
        kind = "system"
    else:
        kind = "user"
    details = getattr(error, "details", "") or "".join(traceback.format_exception(error))
    return wire.Failed.model_validate(
        {"kind": kind, "phase": phase, "error": " ".join(text.split())[:2000], "traceback": details[-20000:]}
    )


if __name__ == "__main__":
    main()
