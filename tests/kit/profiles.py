"""Cost profiles with times that a test chooses."""

from __future__ import annotations

from typing import Any

from slipstream.profiling.profile import CostProfile, ProfileKey, Rate, StepTime

KEY = ProfileKey(
    *("a CPU", 2, "cpu", 2, "llama-0123", "float32", "float16", None),
    *("decoder", "a:B", "0.1.0", "2.13.0", "5.23.0"),
)


def step_time(rows: int, context: int, median_s: float) -> StepTime:
    return StepTime(
        rows, context, median_s, median_s * 0.9, median_s * 1.1, median_s * 0.8, 5, 1000 + context
    )


def profile(medians_s: dict[tuple[int, int], float], **changes: Any) -> CostProfile:
    """By (rows, context)."""
    times = tuple(step_time(rows, context, median_s) for (rows, context), median_s in medians_s.items())
    values: dict[str, Any] = {
        "key": KEY,
        "path": "a/model",
        "measured_at": "2026-01-02T03:04:05+00:00",
        "num_weights": 250,
        "memory_bytes_per_s": Rate(1e4, 2e4),
        "read_bytes_per_s": Rate(1e5, 2e5),
        "flops_per_s": Rate(5e4, 6e4),
        "step_times": times,
    }
    return CostProfile(**values | changes)
