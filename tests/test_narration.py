"""Journal events in words."""

from __future__ import annotations

from pathlib import Path

from tests.run_directory_builder import RunDirectoryBuilder, play_disturbed_run
from trainer.history import RunHistory
from trainer.narration import Narrator
from trainer.records import Event, MetricsRecord
from trainer.store import LocalStore


def told(items: list[Event | MetricsRecord]) -> list[str]:
    narrator = Narrator()
    return [line for item in items if (line := narrator.line(item)) is not None]


def test_an_incident_is_told_from_the_failure_to_the_resumed_step(tmp_path: Path) -> None:
    play_disturbed_run(tmp_path)
    history = RunHistory.load(LocalStore(tmp_path))
    lines = told(list(history.events))
    text = "\n".join(lines)
    assert "worker failure: host_lost" in text
    assert "alive 3/4" in text
    assert "worker group resized 4 -> 3" in text
    assert "checkpoint loaded from checkpoints/" in text
    assert "resharded onto mesh" in text
    assert any("4→3 hosts · resumed at step" in line for line in lines)


def test_the_first_step_after_a_restore_is_told_with_its_loss(tmp_path: Path) -> None:
    play_disturbed_run(tmp_path)
    history = RunHistory.load(LocalStore(tmp_path))
    events = [event for event in history.events if event.incarnation == 2]
    first = next(record for record in history.metrics if record.step == history.topologies[1].first_step)
    lines = told([*events, first])
    assert any(line.startswith("resumed from step") and f"loss {first.loss:.4f}" in line for line in lines)


def test_a_planned_change_is_told_by_what_happened_even_when_no_host_left(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path)
    run.open()
    run.start_group(4)
    for hosts in (2, 3, 3):
        run.train(run.step + 5)
        run.end_group("drained")
        run.continue_on(hosts, cause="drained", planned=True, from_step=run.step)
    lines = [line for line in told(list(RunHistory.load(run.store).events)) if "resumed at step" in line]
    assert [line.split(" at step")[0] for line in lines] == ["shrank", "grew", "planned restart"]
