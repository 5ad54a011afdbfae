"""Draft workers as metrics: whether each is there, how fast it answers, and how many of its continuations were used."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from prometheus_client import Counter

from slipstream.core.metrics.worker import WORKER_STATES, WorkerStats
from slipstream.serve.metrics.instruments import Instruments


class WorkerMetrics:
    """`slipstream_draft_worker_…`, by worker; no series without workers."""

    def __init__(self, new: Instruments) -> None:
        def counter(name: str, help_: str) -> Counter:
            return new.counter(f"draft_worker_{name}", help_, "worker")

        self._state = new.gauge(
            "draft_worker_state", "1 for the state of a draft worker, 0 for the others.", "worker", "state"
        )
        self._round_trip = new.gauge(
            "draft_worker_round_trip_seconds", "The last ping to a draft worker and back.", "worker"
        )
        self._continuation = new.gauge(
            "draft_worker_tail_seconds",
            "From what was committed to the first continuation for it, of late.",
            "worker",
        )
        self._counters = {
            "num_continuations": counter("tails", "Continuations that arrived."),
            "num_stale_continuations": counter(
                "stale_tails", "Continuations that were dropped: for another prefix."
            ),
            "num_late_continuations": counter(
                "late_tails", "Proposals that were empty because the continuation was late."
            ),
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
            if worker.continuation_s is not None:
                self._continuation.labels(worker.address).set(worker.continuation_s)
            for name, counter in self._counters.items():
                number: int = getattr(worker, name)
                before = self._counted.get((worker.address, name), 0)
                counter.labels(worker.address).inc(max(number - before, 0))
                self._counted[worker.address, name] = number
