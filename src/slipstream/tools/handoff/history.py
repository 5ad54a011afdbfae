"""The last minutes of a watched server: the growth of its counters from reading to reading, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.serve.dashboard.history import BUCKET_S, MAX_POSITIONS, NUM_BUCKETS
from slipstream.serve.dashboard.latency import LatencyWindow
from slipstream.tools.handoff.reading import EngineCounts, VllmReading, added

READ_EVERY_S = BUCKET_S
"""Between readings, so that one is one bucket of the page's series."""


@dataclass(frozen=True, slots=True)
class ReadingInterval:
    """What happened between two readings, and the state at the second."""

    seconds: float
    counts: EngineCounts
    num_running: int
    num_waiting: int
    kv_usage: float


class ServerHistory:
    """Readings of one server. `positions` counts since the start of the watch, all else is of the last minutes."""

    def __init__(self, method: str) -> None:
        """`method` is what the drafter is called in metrics."""
        self._method = method
        self._intervals: deque[ReadingInterval] = deque(maxlen=NUM_BUCKETS)
        self.latency = LatencyWindow()
        self.last: VllmReading | None = None
        """The latest reading."""
        self._sums = [0] * MAX_POSITIONS, [0] * MAX_POSITIONS

    @property
    def positions(self) -> dict[str, tuple[list[int], list[int]]]:
        """Since the start, by drafter: how often each position was reached, and its draft token accepted."""
        return {self._method: self._sums} if any(self._sums[0]) else {}

    def add(self, reading: VllmReading) -> ReadingInterval | None:
        """Add a reading; returns the interval since the last one, None for the first and after a restart."""
        last, self.last = self.last, reading
        self.latency.add(reading.latencies)
        grown = None if last is None else reading.counts.since(last.counts)
        if last is None or grown is None:
            return None
        interval = ReadingInterval(
            max(reading.time_s - last.time_s, 1e-9),
            grown,
            reading.num_running,
            reading.num_waiting,
            reading.kv_usage,
        )
        self._intervals.append(interval)
        for sums, counts in zip(self._sums, (grown.reached_at, grown.accepted_at), strict=True):
            for position, count in enumerate(counts[:MAX_POSITIONS]):
                sums[position] += count
        return interval

    def total(self) -> EngineCounts:
        """The sums of the last minutes."""
        return added(interval.counts for interval in self._intervals)

    def as_json(self) -> dict[str, Any]:
        """The series and sums of `PageData`."""
        total, intervals = self.total(), list(self._intervals)
        return {
            "bucket_s": BUCKET_S,
            "tokens_per_s": [each.counts.num_output_tokens / each.seconds for each in intervals],
            "kv_usage": [each.kv_usage for each in intervals],
            "num_running": [each.num_running for each in intervals],
            "num_waiting": [each.num_waiting for each in intervals],
            "num_steps": total.num_steps or total.num_output_tokens,
            "reached": _without_trailing_zeros(total.reached_at),
            "accepted": _without_trailing_zeros(total.accepted_at),
            "latency": self.latency.as_json(),
        }


def _without_trailing_zeros(counts: Seq[int]) -> list[int]:
    """Return it without the zeros at the end."""
    kept = list(counts)
    while kept and not kept[-1]:
        kept.pop()
    return kept
