"""Greedy answers that part at a tie: how many honest ones are to be expected, and whether there were more."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2, norm, poisson

from slipstream.tools.audit.statistics.samples import Floats

_RARE = 1e-6
"""Events with a smaller probability are pooled as one Poisson number."""


@dataclass(frozen=True, slots=True)
class FlipTest:
    """Observed tie flips and the expected number."""

    num_positions: int
    observed: int
    expected: float
    p_value: float
    """Probability of as many flips, or more, if only rounding causes them."""


def flip_probabilities(margins: Seq[float] | Floats, noise: Seq[float] | Floats) -> Floats:
    """Upper estimates of the chance that rounding turns each position's two best tokens around.

    `margins` are the differences of their logits, in nats. `noise` is a sample of what an honest engine's
    log-probabilities differ by when they are computed twice, signed, in nats. The error of a difference of two has
    up to sqrt(2) times its size where they are independent. A sample is finite: its scale is taken at the upper end of
    a 99 % interval, and an error up to twice the largest one seen counts as no rarer than one in the sample's size.
    All zeros: bit-identical arithmetic, under which nothing flips.
    """
    gaps, seen = np.asarray(margins, dtype=float), np.abs(np.asarray(noise, dtype=float))
    if not seen.any():
        return np.zeros(len(gaps))
    scale = math.sqrt(2 * float((seen**2).sum()) / float(chi2.ppf(0.01, len(seen))))
    errors = np.sort(math.sqrt(2) * seen)
    larger = len(errors) - np.searchsorted(errors, gaps)
    by_sample = np.where(gaps <= 2 * errors[-1], (1 + larger) / (1 + len(errors)) / 2, 0.0)
    return np.asarray(np.maximum(norm.sf(gaps / scale), by_sample))


def flip_test(margins: Seq[float] | Floats, noise: Seq[float] | Floats, observed: int) -> FlipTest:
    """Whether so many flips are what rounding explains.

    `margins` are those of all positions that were compared, the flipped ones included; `noise` as in
    `flip_probabilities`.
    """
    chances = flip_probabilities(margins, noise)
    return FlipTest(len(chances), observed, float(chances.sum()), tail_probability(chances, observed))


def smallest_rejected(chances: Floats, level: float) -> int:
    """The smallest number of events of these probabilities that is rarer than `level`; one more than there are where
    none is."""
    mean = float(chances.sum())
    low, high = (
        0,
        min(len(chances), math.ceil(mean + 10 * math.sqrt(mean) + 50)) + 1,
    )  # so many are never likely
    while low < high:
        middle = (low + high) // 2
        if tail_probability(chances, middle) < level:
            high = middle
        else:
            low = middle + 1
    return high


def tail_probability(chances: Floats, observed: int) -> float:
    """P(at least `observed` of independent events with these probabilities): the Poisson binomial's upper tail.

    Exact but for events rarer than a millionth, which are pooled as one Poisson number.
    """
    rare = float(chances[chances < _RARE].sum())
    exact = np.zeros(observed + 1)  # P(index of the other events happen); the last one is P(so many, or more)
    exact[0] = 1.0
    for chance in chances[chances >= _RARE]:
        moved = exact * chance
        exact[:-1] -= moved[:-1]
        exact[1:] += moved[:-1]
    tails = poisson.sf(observed - 1 - np.arange(observed + 1), rare)
    return float(min(1.0, exact @ tails))
