"""Whether one thing happens oftener than its opposite."""

from __future__ import annotations

from scipy.stats import binom


def sign_test(num: int, total: int) -> float:
    """P(at least `num` of `total`) where either outcome is equally probable; 1 without any."""
    return float(binom.sf(num - 1, total, 0.5))
