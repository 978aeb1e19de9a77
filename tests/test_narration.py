"""Journal events in words."""

from __future__ import annotations

import re
from pathlib import Path

from tests.run_directory_builder import RunDirectoryBuilder, play_disturbed_run
from trainer import records
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


def at(kind: type[Event], **fields: object) -> Event:
    return kind.model_validate({"time": 0.0, "monotonic": 0.0, "incarnation": 1, **fields})


def test_a_change_of_capacity_is_told_with_who_made_it_and_its_price() -> None:
    lines = told(
        [
            at(records.CapacityChanged, offered=1, usable=0),
            at(records.CapacityChanged, offered=3, usable=1, source="trace"),
            at(records.CapacityChanged, offered=0, usable=1, source="command", price_per_host_hour=1.25),
        ]
    )
    assert lines == [
        "capacity changed: 1 host offered",
        "capacity changed: 3 hosts offered by the trace",
        "capacity changed: 0 hosts offered by the command at 1.25 per host-hour",
    ]


def test_a_held_growth_is_told_with_its_reason_and_end() -> None:
    held = {"num_hosts": 4, "rule": "stable", "reason": "not yet"}
    assert told([at(records.GrowHeld, until=None, **held)]) == ["not growing to 4 hosts: not yet"]
    (line,) = told([at(records.GrowHeld, until=1_700_000_000.0, **held)])
    assert re.fullmatch(r"not growing to 4 hosts until \d\d:13:20: not yet", line)


def test_lines_of_a_journal_from_before_capacity_had_a_source_are_read() -> None:
    line = '{"time":1,"monotonic":1,"incarnation":1,"event":"capacity_changed","offered":2,"usable":4}'
    event = records.parse_event(line)
    assert isinstance(event, records.CapacityChanged)
    assert (event.offered, event.source, event.price_per_host_hour) == (2, "local", None)
