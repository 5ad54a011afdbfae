"""Testing by betting: bets that are fair under the null hypothesis, and win where it does not hold.

Under the null hypothesis the wealth is a nonnegative martingale (or shrinks), so it ever reaches 1/alpha with
probability at most alpha (Ville, 1939): one may look after each answer and stop at any time. See Shafer, "Testing by
betting" (2021), and Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023).
"""

from __future__ import annotations

import math

_LOG_LARGEST = 700.0
"""The exponential of more is no float."""


class Wealth:
    """What bets have made of 1. Kept as a logarithm, since it may grow beyond any number."""

    def __init__(self, alpha: float) -> None:
        """`alpha` bounds the probability of a false alarm, at whatever time one stops."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
        self.alpha = alpha
        self.log_wealth = 0.0
        self.highest = 0.0
        """Of `log_wealth`, so far."""
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
"""Of what may be lost at most in a bet, the shares that `PairedTest` stakes, each for means of another size."""


class PairedTest(BettingTest):
    """Whether values, such as paired differences, have a mean above `level`: bets that win where they have.

    Gamblers with fixed stakes share the first wealth; each one's is a nonnegative supermartingale where every value's
    mean, given those before, is at most `level`, and so is their mean (Waudby-Smith and Ramdas, "Estimating means of
    bounded random variables by betting", 2024). Nothing else is assumed of the values than a lower bound.
    """

    def __init__(self, confidence: float, level: float = 0.0, lowest: float = -1.0) -> None:
        """No value may be below `lowest`, which must be below `level`."""
        if not lowest < level:
            raise ValueError(f"the lowest value, {lowest}, must be below the level, {level}")
        super().__init__(confidence)
        self.level, self.lowest = level, lowest
        self._log_wealths = [0.0] * len(STAKES)

    def add(self, value: float) -> None:
        """Bet on a value, which must not be known when the test begins."""
        if not value >= self.lowest:
            raise ValueError(f"a value must be at least {self.lowest}, got {value}")
        part = (value - self.level) / (self.level - self.lowest)  # at least -1
        self._log_wealths = [
            log_wealth + math.log1p(stake * part)
            for log_wealth, stake in zip(self._log_wealths, STAKES, strict=True)
        ]
        most = max(self._log_wealths)
        total = sum(math.exp(one - most) for one in self._log_wealths)
        self.wealth.move_to(most + math.log(total / len(STAKES)))
