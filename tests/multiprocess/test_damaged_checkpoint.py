"""Storage never lies: a damaged checkpoint of a real run is set aside, and the next older one is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiprocess.harness import Run, assert_complete, assert_same_training
from trainer.records import CheckpointQuarantined, GroupReady


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    new_run: Callable[..., Run], reference: Run
) -> None:
    run = new_run(steps=30, **{"optimizer.decay_steps": 60})
    run.start()
    assert_complete(run, run.wait_end(), steps=30)
    newest = run.history().newest_commit
    assert newest is not None
    assert newest.step == 30
    file = max(newest.files, key=lambda file: file.size)
    path = run.store.path(f"{newest.path}/{file.path}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    run.start("steps=60")
    aside = run.wait_event(CheckpointQuarantined)
    assert (aside.step, aside.of_incarnation) == (30, 1)
    assert file.path in aside.reason
    ready = run.wait_event(GroupReady, lambda event: event.incarnation == 2)
    assert ready.restored_from.step == 20
    assert_complete(run, run.wait_end())
    assert path.exists(), "set aside is not deleted"
    assert_same_training(run, reference, abandoned=10)
