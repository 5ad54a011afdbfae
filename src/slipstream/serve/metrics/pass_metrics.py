"""Passes as metrics: how many were replays of recorded ones, and why the others were not."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.core.metrics.passes import PassCounts
from slipstream.serve.metrics.instruments import Instruments


class PassMetrics:
    """`slipstream_replayed_passes_total` and `slipstream_eager_passes_total`; no series where none are recorded."""

    def __init__(self, new: Instruments) -> None:
        self._replayed = new.counter(
            "replayed_passes", "Passes that were replays of recorded ones, of target or draft.", "model"
        )
        self._eager = new.counter(
            "eager_passes", "Passes that ran outside a recorded graph, by why.", "model", "reason"
        )
        self._counted: dict[tuple[str, ...], int] = {}

    def on_stats(self, passes: Mapping[str, PassCounts]) -> None:
        """Add what came since the last call."""
        for model, counts in passes.items():
            self._replayed.labels(model).inc(self._gained(counts.num_replayed, model))
            for reason, number in counts.eager.items():
                self._eager.labels(model, reason).inc(self._gained(number, model, reason))

    def _gained(self, number: int, *labels: str) -> int:
        """An engine that was started again counts from zero."""
        before = self._counted.get(labels, 0)
        self._counted[labels] = number
        return number - before if number >= before else number
