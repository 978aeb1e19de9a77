"""The flow process of `benchmarks.orchestration`: trains one run, with Prefect's tasks and without, in turn.

    python -m benchmarks.segment_loop ORDER ANSWER

Both are files of JSON: an `Order`, and a list of `Block`. The group of workers, the controller, the watcher and the
process are the same for both sides, and so is the loop. What differs is whether resize and segment are task runs.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any, Literal

import psutil
from prefect import flow
from pydantic import BaseModel, TypeAdapter

from flows.train import advance
from tasks.capacity import next_decision
from tasks.segment import train_segment
from tasks.watching import watching
from trainer.config import RunConfig
from trainer.control.controller import Controller
from trainer.control.engines.local import measured_device_memory
from trainer.control.journal import listening
from trainer.control.prometheus import serving_metrics
from trainer.control.run import open_run
from trainer.control.signals import stopping_on_signals
from trainer.description import describe_job
from trainer.planning.policy import Train
from trainer.records import JournalEvent, MetricsRecord, SegmentEnded, SegmentStarted

Side = Literal["prefect", "bare"]
SIDES: tuple[Side, ...] = ("prefect", "bare")
# Before that the group has not stood still between two blocks for long enough to have no segment in hand.
LEFT_OUT = 2
# What a block left to the threads and the server to do is done by then, and counted to it.
_SETTLE_SECONDS = 2.0


class Order(BaseModel):
    config: RunConfig
    pairs: int
    """Of blocks: one with Prefect and one without, in an order that alternates."""
    segments: int
    """Of each block."""
    server_pids: list[int]


class Block(BaseModel):
    """Some segments in a row, on one side."""

    side: Side
    segments: int
    gap_seconds: list[float]
    """Between the end of a segment and the start of the next: what the flow's thread does there."""
    segment_seconds: list[float]
    """From the end of a segment to the end of the next: what training loses shows here."""
    flow_cpu_seconds: float
    """Of this process, all its threads."""
    server_cpu_seconds: float
    """Of the server and its database."""


def main(order_path: Path, answer_path: Path) -> None:
    order = Order.model_validate_json(order_path.read_bytes())
    blocks = measured(order.config, order.model_dump(mode="json", exclude={"config"}))
    answer_path.write_bytes(TypeAdapter(list[Block]).dump_json(blocks))


@flow(name="train", flow_run_name="train {config.run_name}", retries=0, persist_result=False)
def measured(config: RunConfig, order: dict[str, Any]) -> Any:
    """As `flows.train.train_run`, with another way through the segments."""
    description = describe_job(config)
    run = open_run(config, description, device_memory_bytes=measured_device_memory(config))
    heard: list[SegmentStarted | SegmentEnded] = []

    def hear(item: JournalEvent | MetricsRecord) -> None:
        if isinstance(item, SegmentStarted | SegmentEnded):
            heard.append(item)

    controller = Controller(run, description)
    with listening(hear), stopping_on_signals(controller), serving_metrics(run.config), watching(run), controller:
        one_segment("prefect", controller)  # forms the group
        return [
            one_block(side, controller, heard, order["segments"], order["server_pids"])
            for pair in range(order["pairs"])
            for side in (SIDES if pair % 2 == 0 else SIDES[::-1])
        ]


def one_block(
    side: Side, controller: Controller, heard: list[SegmentStarted | SegmentEnded], segments: int, server: list[int]
) -> Block:
    heard.clear()
    flow_before, server_before = time.process_time(), cpu_seconds(server)
    for _ in range(segments):
        one_segment(side, controller)
    time.sleep(_SETTLE_SECONDS)
    flow_cpu, server_cpu = time.process_time() - flow_before, cpu_seconds(server) - server_before
    gaps, lengths = intervals(heard)
    return Block(
        side=side,
        segments=segments,
        gap_seconds=gaps,
        segment_seconds=lengths,
        flow_cpu_seconds=flow_cpu,
        server_cpu_seconds=server_cpu,
    )


def intervals(heard: list[SegmentStarted | SegmentEnded]) -> tuple[list[float], list[float]]:
    """Seconds between the end of each segment and the start of the next, and between the ends of both.

    Those of the first segments of a block are left out: the group had trained them before the block began.
    """
    started = [event.monotonic for event in heard if isinstance(event, SegmentStarted)]
    ended = [event.monotonic for event in heard if isinstance(event, SegmentEnded)]
    gaps = [after - before for before, after in zip(ended, started[1:], strict=False)]
    lengths = [after - before for before, after in itertools.pairwise(ended)]
    return gaps[LEFT_OUT - 1 :], lengths[LEFT_OUT - 1 :]


def one_segment(side: Side, controller: Controller) -> None:
    decision = next_decision(controller)
    assert isinstance(decision, Train), decision
    if side == "prefect":
        advance(controller, decision)
    else:
        assert not controller.needs_resize(decision.topology)
        train_segment.fn(controller, decision.until_step)


def cpu_seconds(roots: list[int]) -> float:
    """Of these processes and their descendants so far."""
    total = 0.0
    for root in roots:
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
    return total


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
