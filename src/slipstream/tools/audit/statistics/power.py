"""The smallest deviation that an audit could have found: what its certificate may claim, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from scipy.stats import norm

POWER = 0.9
"""The probability with which a deviation of the smallest detectable size would have been found."""


def smallest_rate(num_trials: int, confidence: float) -> float:
    """The rate of a fault that would have shown at least once, with this confidence, and did not."""
    if num_trials < 1:
        return 1.0
    return float(-math.expm1(math.log1p(-confidence) / num_trials))


def smallest_temperature(
    information: float, confidence: float, factors: Seq[float], num_alternatives: int, favour: float = 0.0
) -> float:
    """The smallest |log(T'/T)| that likelihood-ratio betting would have found with probability `POWER`, up or down.

    `information` is the summed variance of the tokens' log-probabilities under the claim. `factors` are the
    temperatures that are bet on, over the claimed one, higher and lower ones, among `num_alternatives` that share the
    first wealth of 1. Where the temperature is exp(s) times the claimed one, the log wealth of the one that bets
    on exp(b) has the mean (s b - b²/2) information and the variance b² information, for small s and b. Betting
    on 2 % finds nothing below 1 %, however many tokens there are. `favour` are the nats that tokens are given in favour
    of the claim where rounding decides a filter.
    """
    if information <= 0:
        return math.inf
    needed = math.log(num_alternatives / (1 - confidence)) + favour
    root, z = math.sqrt(information), float(norm.ppf(POWER))

    def found(bet: float) -> float:
        return (needed / (bet * root) + z) / root + bet / 2

    bets = [math.log(factor) for factor in factors]
    return max(min(found(bet) for bet in bets if bet > 0), min(found(-bet) for bet in bets if bet < 0))


def smallest_shift(num_pairs: int, confidence: float, num_gamblers: int, num_waiting: int = 0) -> float:
    """The smallest difference of the sources' means that the sequential test would have found with probability `POWER`.

    In standard deviations of a pair's difference, for one feature. The gambler who looks at that feature alone has one
    of `num_gamblers` parts of the first wealth, and learning its weight from n pairs costs about log(n)/2 nats. The
    first `num_waiting` pairs are not bet on. Infinite where the bets are too few: each doubles the wealth at most.
    """
    needed = math.log(num_gamblers / (1 - confidence))
    if num_pairs < 2 or (num_pairs - num_waiting) * math.log(2) < needed:
        return math.inf
    needed += math.log(num_pairs) / 2
    # The x with P(N(x²/2, x²) >= needed) = `POWER`: mean and variance of the log of a likelihood ratio.
    z = float(norm.ppf(POWER))
    return (z + math.sqrt(z * z + 2 * needed)) / math.sqrt(num_pairs)
