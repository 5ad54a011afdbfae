"""A histogram to which equal values can be added at once."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class RepeatedHistogram(Histogram):
    """A histogram without labels."""

    def observe_times(self, value: float, times: int) -> None:
        """The same as `times` calls of `observe`, in one: every call takes locks."""
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)
