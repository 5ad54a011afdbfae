"""Counters, gauges and histograms with the server's prefix, in one registry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slipstream.serve.metrics.vllm_metrics import PREFIX


class RepeatedHistogram(Histogram):
    """A histogram without labels, to which equal values can be added at once."""

    def observe_times(self, value: float, times: int) -> None:
        """The same as `times` calls of `observe`, in one: every call takes locks."""
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


class Instruments:
    """Makes the metrics of one registry; `prefix` comes before every name."""

    def __init__(self, registry: CollectorRegistry, prefix: str = PREFIX) -> None:
        self._registry = registry
        self._prefix = prefix

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        """A counter with these labels."""
        return Counter(self._prefix + name, help_, labels, registry=self._registry)

    def gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        """A gauge with these labels."""
        return Gauge(self._prefix + name, help_, labels, registry=self._registry)

    def histogram(self, name: str, help_: str, buckets: Seq[float]) -> RepeatedHistogram:
        """A histogram without labels; `buckets` are their upper bounds."""
        return RepeatedHistogram(self._prefix + name, help_, buckets=buckets, registry=self._registry)
