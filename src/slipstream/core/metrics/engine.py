"""The state of an engine between two steps, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.core.metrics.passes import PassCounts
from slipstream.core.metrics.worker import WorkerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine holds and has counted, as `Engine.stats` and `AsyncEngine.stats` return it."""

    num_running: int
    """Answers that take part in steps."""
    num_waiting: int
    """Answers that wait to be scheduled, preempted ones included."""
    num_slots: int
    """Tokens whose keys and values the cache can hold."""
    num_held_slots: int
    """Slots of running answers; 0 when the engine is idle."""
    num_retained_slots: int
    """Slots of finished answers, kept for prefix reuse and freed on demand."""
    cache_bytes: int
    """Size of the target's cache, used or not."""
    num_preemptions: int
    """Since the engine was made: how often an answer lost its slots, because the cache was full or another account was
    due a place."""
    num_drafted_sequences: int
    """Sequences for which drafters or the controller keep state; 0 when the engine is idle."""
    num_draft_failures: int
    """Since the engine was made: how often a drafter was retired for a sequence that it failed."""
    retired_drafters: tuple[str, ...]
    """Drafters that are paused after a late call, or were retired because they failed too often."""
    draft_workers: tuple[WorkerStats, ...] = ()
    """Draft workers elsewhere, in the order in which they were configured."""
    num_paused: int = 0
    """Answers that make no tokens until their readers have read more."""
    passes: Mapping[str, PassCounts] = field(default_factory=dict)
    """Passes of the `target` and of the `draft` models since they were loaded, of those whose executors record passes.
    Engines that share a model share its counts."""
    num_overlapped_steps: int = 0
    """Since the engine was made: steps that were launched before the host had read the one before them."""
    drained_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps that could have been and were not, by why; none where the device and the host cannot work at a time."""

    @property
    def cache_usage(self) -> float:
        """Share of the slots that running answers hold, in [0, 1]."""
        return self.num_held_slots / self.num_slots
