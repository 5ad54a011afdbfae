"""Quantiles of times over the last minutes, from readings of Prometheus histograms."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

LATENCIES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "answer": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}
"""What the page calls a time, to the name of its histogram behind the prefix."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WINDOW_S = 360.0
MIN_INTERVAL_S = 1.0
"""Readings that follow each other faster replace each other, so that memory is bounded."""


@dataclass(frozen=True, slots=True)
class BucketCounts:
    """A histogram at one moment, or its growth between two: how many values were at most each bound."""

    bounds: tuple[float, ...]
    """Seconds, ascending; the last is infinity."""
    counts: tuple[float, ...]
    """Cumulative, one a bound."""

    @classmethod
    def of(cls, values: Mapping[float, float]) -> BucketCounts:
        """Make it from a mapping of bound to cumulative count."""
        return cls(tuple(sorted(values)), tuple(values[bound] for bound in sorted(values)))

    @property
    def num(self) -> int:
        """How many values there are."""
        return int(self.counts[-1]) if self.counts else 0

    def since(self, earlier: BucketCounts) -> BucketCounts | None:
        """The growth since an earlier reading; None where it is not of the same, growing histogram."""
        if earlier.bounds != self.bounds:
            return None
        grown = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return None if any(count < 0 for count in grown) else BucketCounts(self.bounds, grown)

    def quantile(self, share: float) -> float | None:
        """By linear interpolation within a bucket, as PromQL's `histogram_quantile`; None without values.

        A quantile beyond the last finite bound is that bound.
        """
        if not self.num:
            return None
        rank = share * self.counts[-1]
        index = next(i for i, count in enumerate(self.counts) if count >= rank)
        finite = [bound for bound in self.bounds if math.isfinite(bound)]
        if not math.isfinite(self.bounds[index]):
            return finite[-1] if finite else None
        below = self.bounds[index - 1] if index else 0.0
        before = self.counts[index - 1] if index else 0.0
        inside = self.counts[index] - before
        return below + (self.bounds[index] - below) * ((rank - before) / inside if inside else 1.0)


class LatencyWindow:
    """The readings of the last `WINDOW_S` seconds; what they grew by is what is shown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, Mapping[str, BucketCounts]]] = deque()

    def add(self, reading: Mapping[str, BucketCounts]) -> None:
        """Add a reading, by the names of `LATENCIES`; one with fewer values than the last begins anew."""
        now_s = self._clock()
        if self._readings and _shrank(self._readings[-1][1], reading):
            self._readings.clear()
        if len(self._readings) > 1 and now_s - self._readings[-2][0] < MIN_INTERVAL_S:
            self._readings.pop()
        self._readings.append((now_s, reading))
        while len(self._readings) > 1 and now_s - self._readings[1][0] >= WINDOW_S:
            self._readings.popleft()

    def as_json(self) -> dict[str, dict[str, Any]]:
        """By name `p50`, `p90` and `p99` in seconds, and `num`; without the names that have no value."""
        if len(self._readings) < 2:
            return {}
        first, last = self._readings[0][1], self._readings[-1][1]
        found: dict[str, dict[str, Any]] = {}
        for name, counts in last.items():
            grown = counts.since(first[name]) if name in first else counts
            if grown is not None and grown.num:
                found[name] = quantiles(grown)
        return found


def _shrank(before: Mapping[str, BucketCounts], after: Mapping[str, BucketCounts]) -> bool:
    return any(name in after and after[name].num < counts.num for name, counts in before.items())


def quantiles(counts: BucketCounts) -> dict[str, Any]:
    """`p50`, `p90`, `p99` in seconds, and `num`."""
    return {**{name: counts.quantile(share) for name, share in QUANTILES.items()}, "num": counts.num}


def bucket_counts(samples: Seq[tuple[float, float]]) -> BucketCounts:
    """From (bound, cumulative count) pairs; those of equal bounds, as of several engines, are added up."""
    sums: dict[float, float] = {}
    for bound, count in samples:
        sums[bound] = sums.get(bound, 0.0) + count
    return BucketCounts.of(sums)
