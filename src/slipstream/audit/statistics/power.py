"""The smallest deviation that an audit could have found: what its certificate may claim, and no more."""

from __future__ import annotations

import math

from scipy.stats import norm

POWER = 0.9
"""The probability with which a deviation of the smallest detectable size would have been found."""


def smallest_rate(num_trials: int, confidence: float) -> float:
    """The rate of a fault that would have shown at least once, with this confidence, and did not."""
    if num_trials < 1:
        return 1.0
    return float(-math.expm1(math.log1p(-confidence) / num_trials))


def smallest_temperature(information: float, confidence: float, num_alternatives: int = 1) -> float:
    """The smallest |log(T'/T)| that likelihood-ratio betting would have found with probability `POWER`.

    `information` is the summed variance of the tokens' log-probabilities under the claim. With a temperature
    exp(s) times the claimed one, the log wealth of the gambler who bets on it has the mean s² information / 2 and twice
    that as its variance, for small s.
    """
    if information <= 0:
        return math.inf
    needed = math.log(num_alternatives / (1 - confidence))
    return _standardised(needed) / math.sqrt(information)


def smallest_shift(num_pairs: int, confidence: float, num_features: int = 6) -> float:
    """The smallest difference of the sources' means that the sequential test would have found with probability `POWER`.

    In standard deviations of a pair's difference, for one feature. Learning `num_features` weights from n pairs costs
    about log(n)/2 nats of wealth each.
    """
    if num_pairs < 2:
        return math.inf
    needed = -math.log(1 - confidence) + num_features * math.log(num_pairs) / 2
    return _standardised(needed) / math.sqrt(num_pairs)


def _standardised(needed: float) -> float:
    """The x with P(N(x²/2, x²) >= needed) = `POWER`: mean and variance of the log of a likelihood ratio."""
    z = float(norm.ppf(POWER))
    return z + math.sqrt(z * z + 2 * needed)
