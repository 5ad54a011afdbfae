"""How many replicas there should be: from what waits, what the caches hold, and how fast answers come.

`policy` is what Ray Serve calls; `wanted` is the rule, without Ray. Ray applies delays and bounds to what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.deploy.fleet import ReplicaReport

LOAD, CAPACITY, CACHE, RATE, RUNNING = "load", "capacity", "cache_usage", "tokens_per_s", "running"
TARGET, MOST_CACHE, LEAST_RATE = "target_load", "max_cache_usage", "min_tokens_per_s"
Stats = Mapping[str, Mapping[Any, float]]
"""Name of a statistic to its value at each replica."""


def stats_of(report: ReplicaReport, capacity: int, queue_share: float) -> dict[str, float]:
    """What a replica records; `queue_share` is its part of the requests that wait in front of all."""
    return {
        LOAD: report.num_running + report.num_waiting + queue_share,
        CAPACITY: float(capacity),
        CACHE: report.cache_usage,
        RATE: report.tokens_per_s,
        RUNNING: float(report.num_running),
    }


def wanted(num_replicas: int, stats: Stats, settings: Mapping[str, float]) -> float:
    """Replicas for the load; one more than there are where caches fill up or answers come too slowly."""
    capacity = _mean(stats.get(CAPACITY, {}))
    if not capacity:
        return float(num_replicas)  # none has reported yet
    for_load = sum(stats.get(LOAD, {}).values()) / (capacity * settings[TARGET])
    least = 0.0
    if _mean(stats.get(CACHE, {})) > settings[MOST_CACHE]:
        least = num_replicas + 1.0
    running = sum(stats.get(RUNNING, {}).values())
    if running and sum(stats.get(RATE, {}).values()) / running < settings[LEAST_RATE]:
        least = num_replicas + 1.0
    return max(float(math.ceil(for_load)), least)


class ScalingPolicy:
    """Ray Serve's `AutoscalingPolicy(policy_function=ScalingPolicy, policy_kwargs=...)`."""

    def __init__(self, **settings: float) -> None:
        self._settings = settings

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Called by Ray Serve's controller with an `AutoscalingContext`."""
        stats = context.aggregated_metrics or {}
        return wanted(context.target_num_replicas, stats, self._settings), context.policy_state


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0
