"""Whether a measured profile can be true: a machine that does something else as well gives figures that cannot be."""

from __future__ import annotations

from slipstream.profiling.profile import CostProfile, StepTime

BELOW_FLOOR = 0.8
"""A median below this part of its floor is beyond what the machine can do. On a quiet machine steps take 1.0 of it and
more; the rest is for the error of both measurements."""
APART = 2.0
"""Quartiles further apart than by this factor say that half of the times are of a machine in another mood."""
MAX_APART_SHARE = 0.25
"""Of the sizes; one row's times are in every conclusion and may not be apart at all."""


def implausible(profile: CostProfile) -> str | None:
    """What cannot be, in a phrase; None for a profile that can be believed.

    A floor rests on how fast the machine read and computed between the passes. Where another process took the memory
    or the cores just then, a pass seems to be quicker than reading its weights, or its own times scatter.
    """
    lowest = min(profile.step_times, key=lambda time: _over_floor(profile, time))
    if _over_floor(profile, lowest) < BELOW_FLOOR:
        return (
            f"{_cell(lowest)} took {_over_floor(profile, lowest):.2f} of the least time in which its weights can be "
            "read and multiplied with"
        )
    apart = [time for time in profile.step_times if time.q3_s > APART * time.q1_s]
    if len(apart) > MAX_APART_SHARE * len(profile.step_times) or any(time.rows == 1 for time in apart):
        widest = max(apart, key=lambda time: time.q3_s / time.q1_s)
        return (
            f"the quartiles of {_cell(widest)} are {widest.q3_s / widest.q1_s:.1f} times apart, and those of "
            f"{len(apart)} of {len(profile.step_times)} sizes more than {APART:g} times"
        )
    return None


def _over_floor(profile: CostProfile, time: StepTime) -> float:
    return time.median_s / profile.floor_s(time)


def _cell(time: StepTime) -> str:
    rows = "one row" if time.rows == 1 else f"{time.rows} rows"
    return f"a step of {rows} at {time.context} tokens of context"
