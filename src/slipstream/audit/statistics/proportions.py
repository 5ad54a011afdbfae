"""Shares of answers: cut ones, wrong counts, differing ones."""

from __future__ import annotations

from scipy.stats import beta, hypergeom


def excess_p_value(observed: int, num: int, other: int, num_other: int) -> float:
    """P(at least `observed` of `num`) if both sources have the same share: Fisher's exact test, one-sided."""
    if not (0 <= observed <= num and 0 <= other <= num_other):
        raise ValueError(f"{observed} of {num} and {other} of {num_other} are no shares")
    return float(hypergeom.sf(observed - 1, num + num_other, observed + other, num))


def upper_bound(observed: int, num: int, confidence: float) -> float:
    """The largest share under which so few would be seen with more than 1 - confidence (Clopper and Pearson, 1934)."""
    if observed >= num:
        return 1.0
    return float(beta.ppf(confidence, observed + 1, num - observed))
