"""Whether a measured profile is plausible. Other load on the machine while it was measured makes figures impossible."""

from __future__ import annotations

from slipstream.profiling.profile import CostProfile, StepTime

BELOW_ROOFLINE = 0.8
"""A median below this share of its roofline time is faster than the machine can be. On an idle machine steps take 1.0
of it and more; the difference allows for the error of both measurements."""
APART = 2.0
"""Quartiles further apart than by this factor mean that other load slowed many of the passes."""
MAX_APART_SHARE = 0.25
"""Largest share of the sizes that may be so. Times of one row enter every conclusion and may not."""


def implausible(profile: CostProfile) -> str | None:
    """What is implausible, in a phrase; None for a plausible profile.

    A roofline time follows from the rates that were read between the passes. Where another process used the memory or
    the cores just then, a pass seems faster than reading its weights, or its own times scatter.
    """
    lowest = min(profile.step_times, key=lambda time: _over_roofline(profile, time))
    if _over_roofline(profile, lowest) < BELOW_ROOFLINE:
        return (
            f"{_cell(lowest)} took {_over_roofline(profile, lowest):.2f} of the least time in which its weights can be "
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


def _over_roofline(profile: CostProfile, time: StepTime) -> float:
    return time.median_s / profile.roofline_s(time)


def _cell(time: StepTime) -> str:
    rows = "one row" if time.rows == 1 else f"{time.rows} rows"
    return f"a step of {rows} at {time.context} tokens of context"
