"""How the processes of a group agree on when to stop: real loops in threads, a barrier in place of the devices."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trainer import wire
from trainer.compute.loop import Loop, Orders
from trainer.records import MetricsRecord

BARRIER_SECONDS = 5.0


@dataclass
class ScriptedOrders(Orders):
    """Delivers each message when its process has begun a given number of steps, and the rest when the loop waits."""

    script: list[tuple[int, wire.Grant | wire.Stop]] = field(default_factory=list)

    def deliver_due(self, step: int) -> None:
        while self.script and self.script[0][0] <= step:
            self.receive(self.script.pop(0)[1])

    def next_limit(self, step: int) -> int | None:
        self.deliver_due(sys.maxsize)
        return super().next_limit(step)


class Devices:
    """What the processes share: each step is a barrier that sums the votes, as the jitted reduction does."""

    def __init__(self, num_processes: int) -> None:
        self._barrier = threading.Barrier(num_processes)
        self._lock = threading.Lock()
        self._votes: dict[int, int] = {}

    def train_step(self, state: int, _batch: Any, vote: int) -> tuple[int, dict[str, Any]]:
        step = state + 1
        with self._lock:
            self._votes[step] = self._votes.get(step, 0) + vote
        self._barrier.wait(timeout=BARRIER_SECONDS)  # breaks if any process runs a step that another does not
        metrics = {"loss": 1.0, "learning_rate": 0.1, "digest": np.zeros(2, np.uint32), "samples": 4}
        return step, {**metrics, "votes": self._votes[step]}


class NoCheckpoints:
    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, step: int, _state: int) -> None:
        if not self.saved or self.saved[-1] != step:
            self.saved.append(step)

    def wait(self) -> None:
        pass


@dataclass
class Ended:
    step: int
    reported: list[int]
    saved: list[int]


def run_group(scripts: list[list[tuple[int, wire.Grant | wire.Stop]]], *, steps: int, until_step: int) -> list[Ended]:
    devices = Devices(len(scripts))
    ended: dict[int, Ended] = {}

    def run_process(index: int) -> None:
        orders = ScriptedOrders(until_step=until_step, script=list(scripts[index]))
        orders.deliver_due(0)  # what reaches a process between its last word and its first step
        reported: list[MetricsRecord] = []

        def batches() -> Iterator[int]:
            for step in range(1, steps + 1):
                orders.deliver_due(step)
                yield step

        checkpointer: Any = NoCheckpoints()
        loop = Loop(
            train_step=devices.train_step,
            batches=batches(),
            votes=lambda vote: vote,  # type: ignore[arg-type, return-value]  # the barrier sums plain numbers
            orders=orders,
            checkpointer=checkpointer,
            report_step=reported.append,
            steps=steps,
            save_interval_steps=5,
            tokens_per_row=1,
        )
        last = loop.run(0, 0)
        ended[index] = Ended(last, [metrics.step for metrics in reported], checkpointer.saved)

    threads = [threading.Thread(target=run_process, args=(index,), daemon=True) for index in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=BARRIER_SECONDS * 2)
    assert len(ended) == len(scripts), "a process hung or failed at a step that the others did not run"
    return [ended[index] for index in range(len(scripts))]


@st.composite
def delivery(draw: st.DrawFn) -> tuple[list[list[tuple[int, wire.Grant | wire.Stop]]], int, int]:
    """One sequence of orders, delivered to each process at its own pace but in order, as a controller sends them."""
    steps = draw(st.integers(1, 25))
    until_step = draw(st.integers(0, steps))
    messages: list[wire.Grant | wire.Stop] = []
    granted = until_step
    while granted < steps and draw(st.booleans()):
        granted = min(steps, granted + draw(st.integers(1, 8)))
        messages.append(wire.Grant(until_step=granted))
    if granted < steps or draw(st.booleans()):
        messages.insert(draw(st.integers(0, len(messages))), wire.Stop())
        if wire.Stop() != messages[-1] and granted < steps:
            messages.append(wire.Stop())
    scripts = []
    for _ in range(draw(st.integers(1, 4))):
        times = sorted(draw(st.lists(st.integers(0, steps), min_size=len(messages), max_size=len(messages))))
        scripts.append(list(zip(times, messages, strict=True)))
    return scripts, steps, until_step


# No shrinking: a broken loop costs each failing example the barrier's whole timeout.
@settings(deadline=None, max_examples=300, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(delivery())
def test_all_processes_stop_after_the_same_step_however_orders_and_steps_overlap(
    case: tuple[list[list[tuple[int, wire.Grant | wire.Stop]]], int, int],
) -> None:
    scripts, steps, until_step = case
    ended = run_group(scripts, steps=steps, until_step=until_step)
    last = ended[0].step
    granted = max([until_step, *(m.until_step for _, m in scripts[0] if isinstance(m, wire.Grant))])
    assert {end.step for end in ended} == {last}
    assert last <= granted
    for end in ended:
        assert end.reported == list(range(1, last + 1)), "each step's metrics are read exactly once, in order"
        assert end.saved == sorted({*range(5, last + 1, 5), last} - {0}), "saved at each boundary and where it stopped"


def test_a_stop_takes_effect_at_most_two_steps_after_the_last_process_has_heard_it() -> None:
    scripts: list[list[tuple[int, wire.Grant | wire.Stop]]] = [[(7, wire.Stop())], [(10, wire.Stop())]]
    ended = run_group(scripts, steps=100, until_step=100)
    assert ended[0].step <= 12


def test_a_group_with_grants_ahead_never_pauses_and_reaches_the_last_step() -> None:
    scripts: list[list[tuple[int, wire.Grant | wire.Stop]]] = [[(1, wire.Grant(until_step=20))]] * 3
    assert [end.step for end in run_group(scripts, steps=20, until_step=10)] == [20, 20, 20]
