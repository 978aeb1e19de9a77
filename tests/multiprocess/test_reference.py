"""The undisturbed run itself, against what can be known without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.multiprocess.harness import SAVE_INTERVAL, STEPS, Run
from trainer.records import CheckpointCommitted, GroupStarting, Incident, SegmentEnded

EXPECTED_DIGESTS = """
import json, sys
from tiny_job import Points
from trainer.compute.data import expected_digest
seed, batch, *steps = map(int, sys.argv[1:])
print(json.dumps([expected_digest(Points(), seed, step, batch) for step in steps]))
"""


def test_each_step_consumed_exactly_the_samples_that_follow_from_seed_and_step(reference: Run) -> None:
    """Computed from the data alone; all other runs of this folder are compared with the reference's digests."""
    config = reference.config
    steps = [1, 2, SAVE_INTERVAL, SAVE_INTERVAL + 1, STEPS]
    answer = subprocess.run(
        [sys.executable, "-c", EXPECTED_DIGESTS, *map(str, [config["seed"], config["global_batch_size"], *steps])],
        cwd=reference.cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    history = reference.history()
    assert [history.metrics[step - 1].sample_digest for step in steps] == json.loads(answer.stdout)
    assert len({metrics.sample_digest for metrics in history.metrics}) == STEPS


def test_an_undisturbed_run_needs_one_group_and_commits_at_every_boundary(reference: Run) -> None:
    assert reference.of(Incident) == []
    assert [event.topology.num_processes for event in reference.of(GroupStarting)] == [4]
    boundaries = list(range(SAVE_INTERVAL, STEPS + 1, SAVE_INTERVAL))
    assert [event.step for event in reference.of(CheckpointCommitted)] == boundaries
    assert [event.end_step for event in reference.of(SegmentEnded)] == boundaries
    ends = [0, *boundaries]
    assert [(s.start_step, s.end_step, s.first_sample) for s in reference.history().segments] == [
        (start, end, 16 * start) for start, end in zip(ends, boundaries, strict=False)
    ], "segments tile the run"
    assert [metrics.step for _, metrics in reference.trained] == list(range(1, STEPS + 1))
