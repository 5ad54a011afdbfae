"""What fits into a memory: the longest context at a batch, the largest batch at a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.plan.planner import Planner

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Requests at once for which the longest context is given."""
MAX_BATCH = 4096
"""No larger batch is looked for unless one is requested."""


@dataclass(frozen=True, slots=True)
class FittingContext:
    """The longest context at a batch; None where not even one token fits."""

    batch: int
    context: int | None


@dataclass(frozen=True, slots=True)
class FittingBatch:
    """The largest batch at a context; None where not even one request fits."""

    context: int
    batch: int | None


def longest_context(planner: Planner, batch: int, memory_bytes: int) -> int | None:
    """The longest context, in tokens, that `batch` requests can have; at most the model's."""
    return _largest(planner.max_context, lambda length: _fits(planner, batch, length, memory_bytes))


def largest_batch(planner: Planner, context: int, memory_bytes: int, most: int = MAX_BATCH) -> int | None:
    """The most requests of `context` tokens that can run at once, up to `most`."""
    return _largest(most, lambda batch: _fits(planner, batch, context, memory_bytes))


def _fits(planner: Planner, batch: int, context: int, memory_bytes: int) -> bool:
    return planner.at(batch, context).peak_bytes <= memory_bytes


def _largest(limit: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number up to `limit` for which `fits` is true; more of it never fits where less does not."""
    if not fits(1):
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
