"""Where segments end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.planning.segment import next_boundary


@pytest.mark.parametrize(
    ("step", "steps", "interval", "boundary"),
    [
        pytest.param(0, 100, 50, 50, id="first segment"),
        pytest.param(50, 100, 50, 100, id="from a boundary to the next"),
        pytest.param(37, 100, 50, 50, id="a shortened segment ends where it would have"),
        pytest.param(100, 120, 50, 120, id="the last step ends the last segment"),
        pytest.param(0, 30, 50, 30, id="a run shorter than the interval"),
        pytest.param(0, 3, 1, 1, id="every step"),
        pytest.param(100, 100, 50, 100, id="a complete run has nothing left"),
    ],
)
def test_a_segment_ends_at_the_next_multiple_of_the_interval_or_with_the_run(
    step: int, steps: int, interval: int, boundary: int
) -> None:
    assert next_boundary(step, steps, interval) == boundary


@given(st.data())
def test_boundaries_do_not_depend_on_where_a_run_was_interrupted(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 500))
    interval = data.draw(st.integers(1, 60))
    boundaries = {*range(interval, steps, interval), steps}
    step = data.draw(st.integers(0, steps - 1))
    seen = set()
    while step < steps:
        end = next_boundary(step, steps, interval)
        assert step < end <= step + interval
        assert not any(step < other < end for other in boundaries)
        seen.add(end)
        step = end
    assert seen <= boundaries
