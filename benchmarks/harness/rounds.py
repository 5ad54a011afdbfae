"""What takes turns, and what its rounds come to: orders, medians with quartiles or an interval, tails."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
from scipy.stats import bootstrap

T = TypeVar("T")


def turns(items: Iterable[T], number: int) -> list[T]:
    """All `items` in the order of round `number`: over the rounds each is first equally often."""
    order = list(items)
    first = number % len(order)
    return order[first:] + order[:first]


def quartiles(values: Seq[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def median(values: Seq[float]) -> dict[str, float]:
    """The median with its 95 % interval by bootstrap."""
    found = bootstrap(
        [values], np.median, method="percentile", rng=np.random.default_rng(1), n_resamples=2000
    )
    low, high = found.confidence_interval
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "num": len(values)}


def tail(values: Seq[float], scale: float = 1.0) -> dict[str, float]:
    """Median and 99th percentile, each times `scale`."""
    return {"median": scale * float(np.median(values)), "p99": scale * float(np.quantile(values, 0.99))}
