"""From counters to rates; what the rates mean is defined by `slipstream.metrics.request`."""

from __future__ import annotations

from slipstream.bench.result import PooledAcceptance
from slipstream.metrics.request import RequestMetrics


def acceptance(counts: RequestMetrics) -> PooledAcceptance:
    """None for a rate of nothing."""
    drafted = counts.num_draft_tokens
    return PooledAcceptance(
        num_steps=counts.num_steps,
        num_draft_tokens=drafted,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_wasted_tokens=drafted - counts.num_accepted_tokens,
        rate=counts.acceptance_rate if drafted else None,
        conditional=counts.conditional_acceptance,
        length=counts.acceptance_length if counts.num_steps else None,
        reached_per_position=counts.reached_per_position,
        accepted_per_position=counts.accepted_per_position,
    )
