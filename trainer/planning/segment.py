"""Where segments end: at multiples of the checkpoint interval, and at the last step."""

from __future__ import annotations


def next_boundary(step: int, steps: int, save_interval_steps: int) -> int:
    """The step up to which a segment that starts after `step` finished steps trains.

    Boundaries are multiples of the interval, wherever a segment starts: a run that was interrupted saves at the same
    steps as one that was not. At `step == steps` the run is complete and the answer is `steps`.
    """
    return min((step // save_interval_steps + 1) * save_interval_steps, steps)
