"""Draft workers in the metrics: states, times and counts."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from slipstream.core.metrics.worker import WorkerStats
from slipstream.serve.metrics.instruments import Instruments
from slipstream.serve.metrics.worker_metrics import WorkerMetrics

STATS = WorkerStats("gpu-box:7070", "connected", "", 0.002, 0.05, 10, 3, 4, 1)


def test_what_an_engine_knows_of_its_workers_is_exposed() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(Instruments(registry))

    def value(name: str, **labels: str) -> float | None:
        labels = {"worker": "gpu-box:7070", **labels}
        return registry.get_sample_value(f"slipstream_draft_worker_{name}", labels)

    assert value("state", state="connected") is None
    metrics.on_stats([STATS])
    metrics.on_stats([STATS])
    assert (value("state", state="connected"), value("state", state="away")) == (1, 0)
    assert (value("round_trip_seconds"), value("tail_seconds")) == (0.002, 0.05)
    assert (value("tails_total"), value("stale_tails_total"), value("late_tails_total")) == (10, 3, 4)
    metrics.on_stats([replace(STATS, state="away", round_trip_s=None, num_late_continuations=9)])
    assert (value("state", state="connected"), value("state", state="away")) == (0, 1)
    assert (value("late_tails_total"), value("connections_total")) == (9, 1)
