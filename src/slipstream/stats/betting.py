"""Testing by betting: bets that are fair under the null hypothesis, and win where it does not hold.

Under the null hypothesis the wealth is a nonnegative martingale (or shrinks), so it ever reaches 1/alpha with
probability at most alpha (Ville, 1939): one may look after each answer and stop at any time. See Shafer, "Testing by
betting" (2021), and Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

_LOG_LARGEST = 700.0
"""The exponential of more is no float."""


def log_mean(log_wealths: Iterable[float]) -> float:
    """The logarithm of the mean of wealths, given and returned as logarithms: gamblers that share a first wealth of 1.

    The mean of nonnegative martingales is one too.
    """
    logs = [float(one) for one in log_wealths]
    most = max(logs)
    if math.isinf(most):
        return most
    return most + math.log(sum(math.exp(one - most) for one in logs) / len(logs))


class Stakes:
    """Gamblers who share a first wealth of 1, each of whom bets its own fixed stake on every value.

    Where no value's mean, given those before, is above 0, each wealth is a nonnegative supermartingale, and so is their
    mean (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024).

    With `restarts` a gambler begins anew with 1 whenever it has lost (Page's CUSUM, 1954), to notice a change however
    late it comes. The mean number of values before the mean wealth reaches x by chance is then at least x (Shin,
    Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", 2023).
    """

    def __init__(self, stakes: Seq[float], *, restarts: bool = False) -> None:
        """No stake times a value may reach -1."""
        self._stakes, self._restarts = tuple(stakes), restarts
        self.log_wealths = [0.0] * len(self._stakes)
        self._ages = [0] * len(self._stakes)

    def bet(self, value: float) -> None:
        """Multiply each wealth by 1 + stake·value."""
        for place, stake in enumerate(self._stakes):
            if self._restarts and self.log_wealths[place] <= 0:
                self.log_wealths[place], self._ages[place] = 0.0, 0
            self.log_wealths[place] += math.log1p(stake * value)
            self._ages[place] += 1

    @property
    def log_wealth(self) -> float:
        """The logarithm of the mean wealth."""
        return log_mean(self.log_wealths)

    @property
    def evidence(self) -> float:
        """The mean wealth; by chance it ever reaches x with probability at most 1 / x, without restarts."""
        return math.exp(min(self.log_wealth, _LOG_LARGEST))

    @property
    def age(self) -> int:
        """Bets since the richest gambler began (anew): an estimate of when the mean moved."""
        return self._ages[max(range(len(self._stakes)), key=self.log_wealths.__getitem__)]


class Wealth:
    """What bets have made of 1. Kept as a logarithm, since it may grow beyond any number."""

    def __init__(self, alpha: float) -> None:
        """`alpha` bounds the probability of a false alarm, at whatever time one stops."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
        self.alpha = alpha
        self.log_wealth = 0.0
        self.highest = 0.0
        """Highest `log_wealth` so far."""
        self.num_bets = 0
        self.rejected_after: int | None = None
        """How many bets it took to reach 1/alpha; None while it has not."""

    def bet(self, log_factor: float) -> None:
        """Multiply the wealth. The factor's expectation under the null hypothesis must be at most 1, given the past."""
        self.move_to(self.log_wealth + log_factor)

    def move_to(self, log_wealth: float) -> None:
        """As `bet`, with the wealth after it."""
        if math.isnan(log_wealth):
            raise ValueError("a wealth must be a number")
        self.log_wealth = log_wealth
        self.num_bets += 1
        self.highest = max(self.highest, log_wealth)
        if self.rejected_after is None and log_wealth >= -math.log(self.alpha):
            self.rejected_after = self.num_bets

    @property
    def rejects(self) -> bool:
        """True once the wealth has reached 1/alpha."""
        return self.rejected_after is not None

    @property
    def p_value(self) -> float:
        """One over the highest wealth, at most 1: valid at any time."""
        return math.exp(-self.highest)


class BettingTest:
    """A test whose evidence is a wealth: anytime valid."""

    def __init__(self, confidence: float) -> None:
        """A false alarm has at most the probability 1 - `confidence`."""
        self.wealth = Wealth(1 - confidence)

    @property
    def rejects(self) -> bool:
        """True once the wealth has reached 1 / (1 - confidence)."""
        return self.wealth.rejects

    @property
    def rejected_after(self) -> int | None:
        """How many bets it took; None while the test does not reject."""
        return self.wealth.rejected_after

    @property
    def e_value(self) -> float:
        """The wealth, which began with 1; a float's largest where it is more."""
        return math.exp(min(self.wealth.log_wealth, _LOG_LARGEST))


STAKES = (0.05, 0.2, 0.5, 0.95)
"""Shares of the most that a bet may lose, as `PairedTest` stakes them, each for means of another size."""


class PairedTest(BettingTest):
    """Whether values, such as paired differences, have a mean above `level`: bets that win where they have.

    Nothing else is assumed of the values than a lower bound.
    """

    def __init__(self, confidence: float, level: float = 0.0, lowest: float = -1.0) -> None:
        """No value may be below `lowest`, which must be below `level`."""
        if not lowest < level:
            raise ValueError(f"the lowest value, {lowest}, must be below the level, {level}")
        super().__init__(confidence)
        self.level, self.lowest = level, lowest
        self._stakes = Stakes(STAKES)

    def add(self, value: float) -> None:
        """Bet on a value, which must not be known when the test begins."""
        if not value >= self.lowest:
            raise ValueError(f"a value must be at least {self.lowest}, got {value}")
        self._stakes.bet((value - self.level) / (self.level - self.lowest))
        self.wealth.move_to(self._stakes.log_wealth)
