"""A sequential test for a shift of a mean, with a bounded rate of false alarms.

Against the hypothesis that the mean of values in [0, 1] is still near the reference one bets on every value:
`1 + stake·weight·(bound - value)` grows on average only where the mean lies below the bound. Such bets, with several
stakes (`betting.Stakes`) and in both directions, have two properties: the mean number of requests before a false alarm
is at least the alarm's threshold, and the probability of a false alarm within n requests is at most n over the
threshold. The only assumptions are the bounds on values and a mean near the reference given the past; neither a normal
distribution nor equal variances are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.stats.betting import Stakes

FALSE_ALARM_RATE = 1 / 25_000
"""Upper bound on one test's long-run rate of false alarms per request."""
MIN_SHIFT = 0.03
"""Smaller shifts raise no alarm."""

_SURETY = 2.5
"""Standard errors by which the true mean may differ from the estimated reference."""
_GAINS = (0.06, 0.12, 0.25)
"""Shifts beyond the tolerance for which the bets are sized."""
_MAX_STAKE = 0.9
"""A bet never loses more than this share."""


@dataclass(frozen=True, slots=True)
class Value:
    """One request's `value` in [0, 1], such as an acceptance rate, and its `weight` in (0, 1]."""

    value: float
    weight: float = 1.0


def mean(values: Collection[Value]) -> float:
    """The weighted mean; NaN without values."""
    total = sum(item.weight for item in values)
    return sum(item.weight * item.value for item in values) / total if total else math.nan


@dataclass(frozen=True, slots=True)
class Reference:
    """The level against which a shift is tested."""

    mean: float
    weight: float
    """Mean weight of a request."""
    variance: float
    """Variance of weight·(value - mean) over requests."""
    tolerance: float
    """Largest difference from `mean` without an alarm: the minimum shift, or the uncertainty of the estimate."""

    @classmethod
    def of(cls, values: Seq[Value]) -> Reference:
        """Estimated from requests. Four pseudo-requests keep the variance above 0 when all values are equal."""
        usual = mean(values)
        weight = sum(item.weight for item in values) / len(values)
        squares = sum((item.weight * (item.value - usual)) ** 2 for item in values)
        variance = (squares + weight**2) / (len(values) + 4)  # 4 requests, 1/2 off the mean each
        standard_error = math.sqrt(variance / len(values)) / weight
        return cls(usual, weight, variance, max(MIN_SHIFT, _SURETY * standard_error))


class Bets(Stakes):
    """Bets on one direction: their wealth grows while the mean is below (or above) `bound`, and restarts when lost."""

    def __init__(self, bound: float, weight: float, variance: float, *, below: bool) -> None:
        """`weight` and `variance`, a request's mean weight and the variance of weight·value, size the bets.

        For bounds that change, `bound` is the one with the largest possible loss: 0 for `below`, else 1.
        """
        self._bound, self._sign = bound, 1 if below else -1
        room = (1 - bound) if below else bound
        gains = [weight * gain for gain in _GAINS]
        super().__init__(
            [min(gain / (variance + gain**2), _MAX_STAKE / max(room, 1e-9)) for gain in gains], restarts=True
        )

    def add(self, item: Value, bound: float | None = None) -> None:
        """Bet on a request; `bound` replaces the constructor's and must be fixed before the request is seen."""
        self.bet(item.weight * self._sign * ((self._bound if bound is None else bound) - item.value))


class ShiftTest:
    """The test of one reference, in one or both directions."""

    def __init__(
        self, reference: Reference, *, rises: bool = True, falls: bool = True, rate: float = FALSE_ALARM_RATE
    ) -> None:
        self.reference = reference
        self._threshold = 1 / rate
        low, high = reference.mean - reference.tolerance, reference.mean + reference.tolerance
        sizes = reference.weight, reference.variance
        self._sides = []
        if falls and low > 0:
            self._sides.append(Bets(low, *sizes, below=True))
        if rises and high < 1:
            self._sides.append(Bets(high, *sizes, below=False))

    def add(self, item: Value) -> bool:
        """Count a request; True when the mean has moved, with at most the given rate of false alarms."""
        for side in self._sides:
            side.add(item)
        return self.evidence >= self._threshold

    @property
    def evidence(self) -> float:
        """The wealth, averaged over directions; an alarm is due at one over the rate."""
        return sum(side.evidence for side in self._sides) / max(len(self._sides), 1)

    @property
    def age(self) -> int:
        """Estimated number of requests since the mean moved."""
        return max(self._sides, key=lambda side: side.evidence).age if self._sides else 0
