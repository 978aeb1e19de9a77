"""Recorded capacity as a number of hosts over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.planning.trace import StepFunction, TraceEvent, availability, parse_trace, replay

Traces = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 7)), min_size=1, max_size=60)


def trace(changes: list[tuple[int, int]]) -> tuple[TraceEvent, ...]:
    """Each (milliseconds to wait, node) adds the node, or removes it if it is there."""
    events, present, now = [], set[int](), 0
    for wait, node in changes:
        now += wait
        events.append(TraceEvent(now, "remove" if node in present else "add", f"node-{node}"))
        present ^= {node}
    return tuple(events)


def text(events: tuple[TraceEvent, ...]) -> str:
    return "".join(f"{event.milliseconds},{event.action},{event.node}\n" for event in events)


def counted(events: tuple[TraceEvent, ...], seconds: float) -> int:
    past = [event.action for event in events if event.milliseconds / 1000 <= seconds]
    return past.count("add") - past.count("remove")


@given(Traces.map(trace), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_what_is_written_is_read_whatever_its_line_ends(events: tuple[TraceEvent, ...], line_end: str) -> None:
    assert parse_trace(text(events).replace("\n", line_end), name="trace") == events


@given(Traces.map(trace), st.floats(0, 400))
def test_hosts_are_the_nodes_added_and_not_removed(events: tuple[TraceEvent, ...], seconds: float) -> None:
    recorded = availability(events)
    assert recorded.offered_at(seconds) == counted(events, seconds)
    for event in events:
        assert recorded.offered_at(event.milliseconds / 1000) == counted(events, event.milliseconds / 1000)


@given(Traces.map(trace), st.floats(0, 400))
def test_the_next_change_is_the_next_moment_with_another_number(events: tuple[TraceEvent, ...], now: float) -> None:
    recorded = availability(events)
    change = recorded.next_change_after(now)
    if change is None:
        assert recorded.offered_at(1e9) == recorded.offered_at(now)
    else:
        assert change > now
        assert recorded.offered_at((now + change) / 2) == recorded.offered_at(now) != recorded.offered_at(change)


@given(Traces.map(trace), st.integers(1, 12))
def test_scaling_keeps_none_none_and_the_order_and_reaches_its_maximum(
    events: tuple[TraceEvent, ...], most_hosts: int
) -> None:
    recorded = availability(events)
    scaled = replay(recorded, speed=1.0, most_hosts=most_hosts)
    pairs = sorted({(recorded.offered_at(moment), scaled.offered_at(moment)) for moment in (-1.0, *recorded.seconds)})
    assert len({before for before, _ in pairs}) == len(pairs), "equal counts are scaled to equal ones"
    assert [after for _, after in pairs] == sorted(after for _, after in pairs)
    assert pairs[0] == (0, 0)
    if recorded.hosts:
        assert pairs[-1] == (max(recorded.hosts), most_hosts)
        assert all(abs(after - before * most_hosts / max(recorded.hosts)) <= 0.5 for before, after in pairs)


@given(Traces.map(trace), st.floats(0.01, 1000), st.floats(0, 300))
def test_speed_changes_when_and_not_what(events: tuple[TraceEvent, ...], speed: float, seconds: float) -> None:
    recorded = availability(events)
    fast = replay(recorded, speed=speed, most_hosts=None)
    for moment in recorded.seconds:
        assert fast.offered_at(moment / speed) == recorded.offered_at(moment)


def test_a_trace_is_scaled_to_the_nearest_number_of_hosts() -> None:
    recorded = StepFunction((0.0, 60.0, 120.0, 180.0, 240.0), (32, 4, 3, 12, 20))
    assert replay(recorded, speed=60.0, most_hosts=4) == StepFunction((0.0, 1.0, 2.0, 3.0, 4.0), (4, 1, 0, 2, 3))


def test_events_of_one_moment_are_one_change() -> None:
    events = parse_trace("0,add,a\n0,add,b\n5,remove,a\n5,add,c\n7,remove,b\n", name="trace")
    assert availability(events) == StepFunction((0.0, 0.007), (2, 1))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("0,add,a\n5,join,b\n", ["line 2", "'join'", "add nor remove"]),
        ("0,add,a\n\n5,add\n", ["line 3", "'5,add'", "milliseconds,add|remove,node"]),
        ("0,add,a\n5,add,\n", ["line 2", "milliseconds,add|remove,node"]),
        ("milliseconds,add,node\n", ["line 1", "'milliseconds'", "whole number"]),
        ("0.5,add,a\n", ["line 1", "'0.5'", "whole number"]),
        ("-1,add,a\n", ["line 1", "'-1'"]),
        ("5,add,a\n4,add,b\n", ["line 2", "back from 5 to 4 ms"]),
        ("0,add,a\n5,add,a\n", ["line 2", "a is added but is there already"]),
        ("0,remove,a\n", ["line 1", "a is removed but is not there"]),
        ("\n \n", ["trace.csv holds no event", "60000,add,node-1"]),
    ],
)
def test_a_damaged_trace_is_refused_by_line(content: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_trace(content, name="trace.csv")
    for part in ("trace.csv", *parts):
        assert part in str(caught.value)
