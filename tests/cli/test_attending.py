"""How many deaths in a row count as a process that never begins."""

from __future__ import annotations

import datetime

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Crashed, Failed, Pending, Running, Scheduled

from deployments.attending import false_starts

DEATH = (Scheduled, Pending, Crashed)


@pytest.mark.parametrize(
    ("kinds", "deaths"),
    [
        ((Scheduled,), 0),
        (DEATH, 1),
        ((*DEATH, *DEATH, Scheduled), 2),
        ((*DEATH, *DEATH, Scheduled, Pending), 2),
        ((*DEATH, Scheduled, Pending, Running, Crashed, Scheduled), 1),  # that one ran: the flow counts it
        ((*DEATH, *DEATH, Failed, Scheduled), 0),
        ((*DEATH, *DEATH, AwaitingRetry, Pending), 0),
    ],
)
def test_deaths_before_the_flow_began_are_counted_back_to_the_last_other_state(
    kinds: tuple[type[State]], deaths: int
) -> None:
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    states = [kind(timestamp=start + datetime.timedelta(seconds=second)) for second, kind in enumerate(kinds)]
    assert false_starts(states[::-1]) == deaths
