"""Student's t distribution for whole degrees of freedom, where its distribution function is a finite sum.

SciPy has it too, but takes a part of a second of every start to import.
"""

from __future__ import annotations

import functools
import math


def within(value: float, freedom: int) -> float:
    """The chance that |t| is at most `value` with `freedom` degrees of freedom; Abramowitz and Stegun, 26.7.3 and 4."""
    angle = math.atan(value / math.sqrt(freedom))
    cos = math.cos(angle)
    odd = freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos * cos * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


@functools.cache
def quantile(freedom: int, chance: float) -> float:
    """The value that t exceeds with a chance of 1 - `chance`, for a `chance` of at least one half."""
    low, high = 0.0, 1.0
    while within(high, freedom) < 2 * chance - 1:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 2 * chance - 1 else (low, middle)
    return high
