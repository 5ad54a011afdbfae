"""Statistics of timed runs: percentiles, paired speedups, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
FEW = 10
"""Fewer prompts (or batches) are marked as few: their bootstrap interval is too narrow."""
BOOTSTRAP_SEED = 20260101
"""Fixed, so that the same measurements give the same interval."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `num` values, linearly interpolated; p99 of fewer than 100 values is close to their maximum."""

    p50: float
    p90: float
    p99: float
    num: int


def percentiles(values: Seq[float]) -> Percentiles | None:
    """Percentiles of `values`; None without values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Percentiles(p50, p90, p99, len(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A bootstrap confidence interval."""

    low: float
    high: float
    confidence: float
    num_pairs: int
    """Number of resampled pairs: prompts, or batches where several requests run at once."""

    @property
    def holds_one(self) -> bool:
        """True where the interval does not decide which of the two is faster."""
        return self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Tokens and seconds of the same batches with a configuration (`on`) and with speculation off."""

    tokens_on: Seq[float]
    seconds_on: Seq[float]
    tokens_off: Seq[float]
    seconds_off: Seq[float]

    def __len__(self) -> int:
        return len(self.tokens_on)

    @property
    def speedup(self) -> float:
        """Tokens a second with the configuration over tokens a second without, all batches together."""
        return float(self._speedups(np.arange(len(self))))

    def _speedups(self, chosen: Any) -> Any:
        """Speedups of resampled batches: indices [..., n] -> [...]."""

        def total(values: Seq[float]) -> Any:
            return np.asarray(values, dtype=float)[chosen].sum(axis=-1)

        speed_on = total(self.tokens_on) / total(self.seconds_on)
        return speed_on / (total(self.tokens_off) / total(self.seconds_off))


def joined(groups: Seq[PairedTimes]) -> PairedTimes:
    """The pairs of all groups together."""
    return PairedTimes(
        tokens_on=[value for group in groups for value in group.tokens_on],
        seconds_on=[value for group in groups for value in group.seconds_on],
        tokens_off=[value for group in groups for value in group.tokens_off],
        seconds_off=[value for group in groups for value in group.seconds_off],
    )


def geometric_mean_speedup(groups: Seq[PairedTimes]) -> float | None:
    """Geometric mean of the groups' speedups; None without data."""
    if not groups or not all(map(len, groups)):
        return None
    return math.exp(sum(math.log(group.speedup) for group in groups) / len(groups))


def speedup_interval(groups: Seq[PairedTimes]) -> Interval | None:
    """Percentile bootstrap of the geometric mean of the groups' speedups (of one group: of its speedup).

    Pairs are resampled within each group, a pair's two measurements together. None where some group has fewer
    than two pairs.
    """
    from scipy.stats import bootstrap

    if not groups or min(map(len, groups)) < 2:
        return None

    def statistic(*chosen: Any, axis: int = -1) -> Any:
        logs = [
            np.log(group._speedups(np.moveaxis(indices, axis, -1).astype(int)))
            for group, indices in zip(groups, chosen, strict=True)
        ]
        return np.exp(sum(logs) / len(logs))

    result = bootstrap(
        [np.arange(len(group)) for group in groups],
        statistic,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    )
    low, high = result.confidence_interval
    return Interval(float(low), float(high), CONFIDENCE, sum(map(len, groups)))


def first_difference(first: Seq[object], second: Seq[object]) -> int | None:
    """Position, from 0, of the first differing token or character; None where the texts are identical. One that is a
    beginning of the other differs at its end."""
    if list(first) == list(second):
        return None
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`; None where the denominator is 0."""
    return numerator / denominator if denominator else None
