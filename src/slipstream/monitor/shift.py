"""Has a mean moved? A sequential test with a stated rate of false alarms.

The test is a CUSUM-style e-detector (Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential
change detection", 2023). Against the hypothesis that the mean of values in [0, 1] is still near the reference one bets
on every value: `1 + λ·weight·(bound - value)` grows on average only where the mean lies below the bound. Products of
such bets that start anew whenever they have lost (Page's CUSUM, 1954), averaged over several λ and both directions,
have the property that the mean number of requests before a false alarm is at least the threshold that raises it, and
that a false alarm comes within n requests with a chance of at most n over the threshold. Nothing is assumed of the
values but the bounds and that, whatever came before, the mean is near the reference: neither a normal distribution
nor equal variances, which the acceptance of requests does not have.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

FALSE_ALARM_RATE = 1 / 25_000
"""At most so many false alarms a request, in the long run, of one test."""
MIN_SHIFT = 0.03
"""A mean that moved by less is not worth an alarm."""

_SURETY = 2.5
"""Standard errors of the reference by which its true mean may lie beside it."""
_GAINS = (0.06, 0.12, 0.25)
"""Shifts, beyond what is tolerated, that the bets are made for."""
_MAX_STAKE = 0.9
"""A bet never loses more than this share."""


@dataclass(frozen=True, slots=True)
class Value:
    """One request's: `value` in [0, 1], such as an acceptance rate, and how much it says, in (0, 1]."""

    value: float
    weight: float = 1.0


def mean(values: Collection[Value]) -> float:
    """The weighted mean; NaN of nothing."""
    total = sum(item.weight for item in values)
    return sum(item.weight * item.value for item in values) / total if total else math.nan


@dataclass(frozen=True, slots=True)
class Reference:
    """What was usual."""

    mean: float
    weight: float
    """Mean weight of a request."""
    variance: float
    """Of weight·(value - mean), from request to request: requests differ by more than the luck of their tokens."""
    tolerance: float
    """How far from `mean` the true mean may lie without an alarm: what is not worth one, or not known better."""

    @classmethod
    def of(cls, values: Seq[Value]) -> Reference:
        """Learned from some requests. Two made-up pairs of opposite requests keep equal values from seeming certain."""
        usual = mean(values)
        weight = sum(item.weight for item in values) / len(values)
        squares = sum((item.weight * (item.value - usual)) ** 2 for item in values)
        variance = (squares + weight**2) / (len(values) + 4)  # 4 requests, 1/2 off the mean each
        standard_error = math.sqrt(variance / len(values)) / weight
        return cls(usual, weight, variance, max(MIN_SHIFT, _SURETY * standard_error))


class Bets:
    """One direction: capital that grows while the mean is below (or above) `bound`, and starts anew when it is lost."""

    def __init__(self, bound: float, weight: float, variance: float, *, below: bool) -> None:
        """`weight` and `variance` are a request's mean weight and the variance of weight·value: they size the bets.

        Where bounds move, `bound` is the one that could lose most: 0 for `below`, else 1.
        """
        self._bound = bound
        self._sign = 1 if below else -1
        room = (1 - bound) if below else bound
        self._stakes = [
            min(weight * gain / (variance + (weight * gain) ** 2), _MAX_STAKE / max(room, 1e-9))
            for gain in _GAINS
        ]
        self._log_capital = [0.0] * len(_GAINS)
        self._ages = [0] * len(_GAINS)

    def add(self, item: Value, bound: float | None = None) -> None:
        """Bet on a request; `bound` is that of this request, fixed before it was seen, where bounds move."""
        gain = item.weight * self._sign * ((self._bound if bound is None else bound) - item.value)
        for i, stake in enumerate(self._stakes):
            if self._log_capital[i] <= 0:
                self._log_capital[i], self._ages[i] = 0.0, 0
            self._log_capital[i] += math.log(1 + stake * gain)
            self._ages[i] += 1

    @property
    def evidence(self) -> float:
        """The capital, averaged over the stakes; at least 1 in `1 / evidence` by chance alone."""
        return sum(math.exp(min(log, 100.0)) for log in self._log_capital) / len(_GAINS)

    @property
    def age(self) -> int:
        """Requests since the richest capital started anew: an estimate of when the mean moved."""
        return self._ages[max(range(len(_GAINS)), key=self._log_capital.__getitem__)]


class ShiftTest:
    """Tells when the mean is no longer near the reference."""

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
        """Take in a request; True when the mean has moved, at no more than the stated rate of false alarms."""
        for side in self._sides:
            side.add(item)
        return self.evidence >= self._threshold

    @property
    def evidence(self) -> float:
        """The capital of all sides, averaged; the threshold is one over the rate."""
        return sum(side.evidence for side in self._sides) / max(len(self._sides), 1)

    @property
    def age(self) -> int:
        """Requests since the mean moved, by estimate."""
        return max(self._sides, key=lambda side: side.evidence).age if self._sides else 0
