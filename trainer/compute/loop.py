"""The training loop, top to bottom, and how its processes agree on when to stop.

No process may run a step that another does not. Each feeds a vote into the step's own reduction, 1 if it was told to
stop or has no grant for the step after next, and all read the same sum back with the metrics, one step late. After a
sum above 0 all pause after the same step, and go on or stop by the controller's next message, which is the same for
all. So there is no barrier, and no process ever waits for Python on another.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from trainer import wire
from trainer.compute.checkpoint import Checkpointer
from trainer.compute.data import digest_text
from trainer.planning.segment import next_boundary
from trainer.records import MetricsRecord

PyTree = Any


@dataclass
class Orders:
    """What the controller said: grants and the stop, in order. Filled by the reader thread."""

    until_step: int
    """Highest step that may be run."""
    stop: bool = False
    _messages: queue.SimpleQueue[wire.Grant | wire.Stop] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.first_limit = self.until_step
        """The limit that all processes begin with. Grants that came since are in the queue, and taken from there."""

    def receive(self, message: wire.Grant | wire.Stop) -> None:
        match message:
            case wire.Stop():
                self.stop = True
            case wire.Grant():
                self.until_step = max(self.until_step, message.until_step)
        self._messages.put(message)

    def vote(self, step: int) -> int:
        """To be fed with `step`: 1 unless this process may run the step after next."""
        return int(self.stop or self.until_step < step + 2)

    def next_limit(self, step: int) -> int | None:
        """All processes paused after `step`: the new limit, or None to stop.

        Each process takes the same messages from the same sequence, so that all decide alike however the messages
        and the steps overlapped. Blocks until there is one that decides.
        """
        while True:
            match self._messages.get():
                case wire.Stop():
                    return None
                case wire.Grant(until_step=until_step) if until_step > step:
                    return until_step


@dataclass
class Loop:
    """Runs steps `start_step + 1 … steps` of one incarnation on one process."""

    train_step: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, dict[str, jax.Array]]]
    batches: Iterator[PyTree]
    votes: Callable[[int], jax.Array]
    """The vote of this process as a global array, one element per device."""
    orders: Orders
    checkpointer: Checkpointer
    report_step: Callable[[MetricsRecord], None]
    steps: int
    save_interval_steps: int
    tokens_per_row: int

    def run(self, state: PyTree, start_step: int) -> int:
        """Returns the step after which all processes stopped; its state is saved, or its failure reported."""
        step, limit = start_step, self.orders.first_limit
        unread: tuple[int, dict[str, jax.Array]] | None = None
        self._last_end = time.monotonic()
        while step < self.steps:
            if step >= limit:
                if unread is not None:
                    self._read(*unread)
                    unread = None
                new_limit = self.orders.next_limit(step)
                if new_limit is None:
                    break
                limit = new_limit
            batch = next(self.batches)
            state, metrics = self.train_step(state, batch, self.votes(self.orders.vote(step + 1)))
            step += 1
            if unread is not None:
                # The device works on `step` while Python looks at the step before.
                limit = step if self._read(*unread) else max(limit, step + 1)
            unread = step, metrics
            if step == next_boundary(step - 1, self.steps, self.save_interval_steps):
                self.checkpointer.save(step, state)
        if unread is not None:
            self._read(*unread)
        if step > 0:
            self.checkpointer.save(step, state)
        self.checkpointer.wait()
        return step

    def _read(self, step: int, metrics: dict[str, jax.Array]) -> bool:
        """Wait for the metrics of a step and report them. Returns whether any process voted to pause."""
        values: dict[str, np.ndarray] = jax.device_get(metrics)
        now = time.monotonic()
        samples = int(values["samples"])
        self.report_step(
            MetricsRecord(
                step=step,
                loss=float(values["loss"]),
                learning_rate=float(values["learning_rate"]),
                samples=samples,
                tokens=samples * self.tokens_per_row,
                sample_digest=digest_text(values["digest"]),
                step_seconds=now - self._last_end,
            )
        )
        self._last_end = now
        return int(values["votes"]) > 0
