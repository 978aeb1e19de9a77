"""Every moment of a run is counted once, whatever the journal says."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.planning.goodput import BADPUT_KINDS, Kind, Span, divide_timeline, measure_goodput

# Eighths of a second: sums and differences of them are exact, so that the tests need no tolerance.
TIMES = st.integers(-80, 800).map(lambda eighths: eighths / 8)
SPANS = st.lists(st.builds(Span, st.sampled_from(Kind), TIMES, TIMES), max_size=12)


@given(spans=SPANS, start=TIMES, seconds=st.integers(0, 800).map(lambda eighths: eighths / 8))
def test_the_kinds_sum_to_the_elapsed_time_exactly(spans: list[Span], start: float, seconds: float) -> None:
    goodput = measure_goodput(divide_timeline(spans, start, start + seconds))
    assert math.fsum(goodput.seconds.values()) == goodput.elapsed_seconds == seconds
    assert goodput.productive_seconds + sum(goodput.badput.values()) == goodput.running_seconds


@given(spans=SPANS, start=TIMES, seconds=st.integers(1, 200).map(lambda eighths: eighths / 8))
def test_each_moment_has_the_kind_of_highest_precedence_that_covers_it(
    spans: list[Span], start: float, seconds: float
) -> None:
    timeline = divide_timeline(spans, start, start + seconds)
    for eighth in range(round(seconds * 8)):
        moment = start + eighth / 8 + 1 / 16
        covering = [span.kind for span in spans if span.start <= moment < span.end]
        expected = next((kind for kind in Kind if kind in covering), Kind.OTHER)
        assert [span.kind for span in timeline if span.start <= moment < span.end] == [expected]


@given(spans=SPANS, start=TIMES, seconds=st.integers(0, 800).map(lambda eighths: eighths / 8))
def test_a_timeline_has_no_gaps_and_no_two_neighbours_of_one_kind(
    spans: list[Span], start: float, seconds: float
) -> None:
    timeline = divide_timeline(spans, start, start + seconds)
    edges = [start, *(span.end for span in timeline)]
    assert edges[-1] == start + seconds
    assert [span.start for span in timeline] == edges[:-1]
    assert all(left.kind != right.kind for left, right in itertools.pairwise(timeline))


def test_a_stop_is_neither_goodput_nor_badput() -> None:
    spans = [Span(Kind.PRODUCTIVE_STEP, 0, 6), Span(Kind.STOPPED, 6, 100), Span(Kind.PROGRAM_STARTUP, 100, 102)]
    goodput = measure_goodput(divide_timeline(spans, 0, 102))
    assert goodput.fraction == 6 / 8
    assert goodput.badput == {Kind.PROGRAM_STARTUP: 2}


def test_badput_is_listed_largest_first_and_without_zeros() -> None:
    spans = [Span(Kind.CHECKPOINT_SAVING, 0, 1), Span(Kind.WASTED_PROGRESS, 1, 4), Span(Kind.ELASTIC_RESIZE, 4, 6)]
    badput = measure_goodput(divide_timeline(spans, 0, 6)).badput
    assert list(badput) == [Kind.WASTED_PROGRESS, Kind.ELASTIC_RESIZE, Kind.CHECKPOINT_SAVING]


def test_before_any_time_has_passed_there_is_no_fraction() -> None:
    assert measure_goodput([]).fraction is None
    assert measure_goodput(divide_timeline([], 5, 5)).fraction is None


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_is_goodput_badput_or_a_stop(kind: Kind) -> None:
    """The names are a contract: `shoal status --json` shows them."""
    assert (kind in BADPUT_KINDS) != (kind.value in ("productive_step", "stopped"))
