"""Draft workers as metrics: whether each is there, how fast it answers, and what became of its tails."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge

from slipstream.core.metrics.worker import WORKER_STATES, WorkerStats
from slipstream.serve.metrics.vllm_metrics import PREFIX


class WorkerMetrics:
    """`slipstream_draft_worker_…`, by worker; no series without workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + "draft_worker_" + name, help_, ("worker", *labels), registry=registry)

        def counter(name: str, help_: str) -> Counter:
            return Counter(PREFIX + "draft_worker_" + name, help_, ("worker",), registry=registry)

        self._state = gauge("state", "1 for the state of a draft worker, 0 for the others.", "state")
        self._round_trip = gauge("round_trip_seconds", "The last ping to a draft worker and back.")
        self._tail = gauge("tail_seconds", "From what was committed to the first tail for it, of late.")
        self._counters = {
            "num_tails": counter("tails", "Tails that arrived."),
            "num_stale_tails": counter("stale_tails", "Tails that were dropped: for another prefix."),
            "num_late_tails": counter("late_tails", "Proposals that were empty because the tail was late."),
            "num_connections": counter("connections", "Connections that were made to a draft worker."),
        }
        self._counted: dict[tuple[str, str], int] = {}

    def on_stats(self, workers: Seq[WorkerStats]) -> None:
        """Set the gauges, and add to the counters what came since the last call."""
        for worker in workers:
            for state in WORKER_STATES:
                self._state.labels(worker.address, state).set(state == worker.state)
            if worker.round_trip_s is not None:
                self._round_trip.labels(worker.address).set(worker.round_trip_s)
            if worker.tail_s is not None:
                self._tail.labels(worker.address).set(worker.tail_s)
            for name, counter in self._counters.items():
                number: int = getattr(worker, name)
                before = self._counted.get((worker.address, name), 0)
                counter.labels(worker.address).inc(max(number - before, 0))
                self._counted[worker.address, name] = number
