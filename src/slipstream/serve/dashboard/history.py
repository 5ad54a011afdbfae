"""The last few minutes of the engine, for the dashboard: counted in its steps, in bounded memory."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

from slipstream.core.metrics.decoded import DecodedRow, DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.step import StepReport

K = TypeVar("K", int, str)

BUCKET_S = 2.0
NUM_BUCKETS = 180
MAX_POSITIONS = 32
"""Deeper draft tokens are not counted by position."""


class _Bucket:
    """The counters of two seconds."""

    __slots__ = (
        *("index", "num_tokens", "num_steps", "draft_s", "verify_s", "other_s"),
        *("reached", "accepted", "tasks", "batches", "num_running", "num_waiting", "kv_usage"),
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = self.num_steps = 0
        self.draft_s = self.verify_s = self.other_s = 0.0
        self.reached = [0] * MAX_POSITIONS
        self.accepted = [0] * MAX_POSITIONS
        self.tasks: dict[str, list[int]] = {}
        """Label to the numbers of passes, and of emitted, draft, accepted and reached tokens."""
        self.batches: dict[int, list[int]] = {}
        """Number of decoding sequences in a step, to the sums of such steps, of their sequences, and of the draft
        depths."""
        self.num_running = self.num_waiting = 0
        self.kv_usage = 0.0

    def copy(self) -> _Bucket:
        """A copy that later steps do not change."""
        other = copy.copy(self)
        other.reached, other.accepted = self.reached[:], self.accepted[:]
        other.tasks = {label: sums[:] for label, sums in self.tasks.items()}
        other.batches = {size: sums[:] for size, sums in self.batches.items()}
        return other


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one moment; later steps do not change them."""

    buckets: list[_Bucket]
    newest: int
    """The index of the bucket that was incomplete."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON: series of buckets, oldest first, the newest left out; and sums over all of them."""
        kept = [bucket for bucket in self.buckets if bucket.index >= self.newest - NUM_BUCKETS]
        by_index = {bucket.index: bucket for bucket in kept}
        series = [by_index.get(index) for index in range(min(by_index, default=self.newest), self.newest)]
        return {
            "bucket_s": BUCKET_S,
            "tokens_per_s": [bucket.num_tokens / BUCKET_S if bucket else 0.0 for bucket in series],
            "kv_usage": [bucket.kv_usage if bucket else 0.0 for bucket in series],
            "num_running": [bucket.num_running if bucket else 0 for bucket in series],
            "num_waiting": [bucket.num_waiting if bucket else 0 for bucket in series],
            "num_steps": sum(bucket.num_steps for bucket in kept),
            "draft_s": sum(bucket.draft_s for bucket in kept),
            "verify_s": sum(bucket.verify_s for bucket in kept),
            "other_s": sum(bucket.other_s for bucket in kept),
            "reached": _added([bucket.reached for bucket in kept]),
            "accepted": _added([bucket.accepted for bucket in kept]),
            "tasks": _by_key([bucket.tasks for bucket in kept]),
            "batches": self.batches(),
        }

    def batches(self) -> dict[int, list[int]]:
        """Number of decoding sequences in a step, to the sums of such steps, of their sequences, and of the draft
        depths."""
        return _by_key([bucket.batches for bucket in self.buckets])


class History:
    """Counts where the engine's steps are reported; `snapshot` must be called there too."""

    def __init__(self, task_label: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        """`task_label` returns the label under which a row's `group` is counted, from a bounded set."""
        self._task_label = task_label
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=NUM_BUCKETS)
        self.positions: dict[str, tuple[list[int], list[int]]] = {}
        """Since the start, by drafter: how often each position was reached, and how often its draft token was
        accepted."""

    def on_step(self, step: StepReport) -> None:
        """Count a step's time."""
        bucket = self._bucket()
        bucket.num_steps += 1
        bucket.draft_s += step.draft_s
        bucket.verify_s += step.verify_s
        bucket.other_s += max(step.other_s, 0.0)

    def on_rows(self, rows: Seq[DecodedRow]) -> None:
        """Count a step's draft, accepted and emitted tokens."""
        if rows:
            self._add_rows(zip(rows, repeat(1)))
            self._add_batch(len(rows), sum(row.draft_depth for row in rows if row.num_drafted))

    def on_steps(self, decoded: DecodedSteps) -> None:
        """Count several steps, all as of now."""
        self._add_rows(decoded.rows)
        for report, num_answers, depths in decoded.steps:
            self.on_step(report)
            if num_answers:
                self._add_batch(num_answers, depths)

    def _add_batch(self, num_answers: int, depths: int) -> None:
        batch = self._bucket().batches.setdefault(num_answers, [0, 0, 0])
        batch[0] += 1
        batch[1] += num_answers
        batch[2] += depths

    def _add_rows(self, rows: Iterable[tuple[DecodedRow, int]]) -> None:
        """Each row as often as its number says."""
        bucket = self._bucket()
        for row, times in rows:
            bucket.num_tokens += row.num_emitted * times
            label = self._task_label(row.group)
            task = bucket.tasks.get(label)
            if task is None:
                task = bucket.tasks[label] = [0] * 5
            task[0] += times
            task[1] += row.num_emitted * times
            if row.num_drafted:
                task[2] += row.num_drafted * times
                task[3] += row.num_accepted * times
                task[4] += row.num_reached * times
                counts = self.positions.get(row.method)
                if counts is None:
                    counts = self.positions[row.method] = [0] * MAX_POSITIONS, [0] * MAX_POSITIONS
                for position in range(min(row.num_reached, MAX_POSITIONS)):
                    bucket.reached[position] += times
                    counts[0][position] += times
                for position in range(min(row.num_accepted, MAX_POSITIONS)):
                    bucket.accepted[position] += times
                    counts[1][position] += times

    def sample(self, stats: EngineStats) -> None:
        """Record the state of the queue and the cache."""
        bucket = self._bucket()
        bucket.num_running, bucket.num_waiting = stats.num_running, stats.num_waiting
        bucket.kv_usage = stats.cache_usage

    def snapshot(self) -> Snapshot:
        """A copy of the counters; quick."""
        buckets = list(self._buckets)
        if buckets:
            buckets[-1] = buckets[-1].copy()  # later steps may still change it
        return Snapshot(buckets, self._index())

    def _index(self) -> int:
        return int(self._clock() / BUCKET_S)

    def _bucket(self) -> _Bucket:
        """The bucket of this moment."""
        index = self._index()
        if not self._buckets or self._buckets[-1].index != index:
            self._buckets.append(_Bucket(index))
        return self._buckets[-1]


def _added(lists: Seq[Seq[int]]) -> list[int]:
    """Sums element by element, without the zeros at the end."""
    sums = [sum(values) for values in zip(*lists, strict=True)]
    while sums and not sums[-1]:
        sums.pop()
    return sums


def _by_key(parts: Iterable[dict[K, list[int]]]) -> dict[K, list[int]]:
    """The lists of equal keys added up, sorted by key."""
    sums: dict[K, list[int]] = {}
    for part in parts:
        for key, values in part.items():
            old = sums.get(key)
            sums[key] = values if old is None else [a + b for a, b in zip(old, values, strict=True)]
    return dict(sorted(sums.items()))
