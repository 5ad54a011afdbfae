"""What a chain of draft tokens gains at a given acceptance rate and given costs (docs/concepts/speculation.md)."""

from __future__ import annotations

from slipstream.profiling.profile import CostProfile


def acceptance_length(acceptance_rate: float, num_draft_tokens: int) -> float:
    """τ of a chain whose tokens are accepted independently, each with probability α: 1 + α + … + α^γ."""
    return sum(acceptance_rate**depth for depth in range(num_draft_tokens + 1))


def draft_cost(target: CostProfile, draft: CostProfile, context: float) -> float:
    """c: a draft step over a target step, of one row each."""
    return draft.step_s(1, context) / target.step_s(1, context)


def round_cost(target: CostProfile, draft: CostProfile, num_draft_tokens: int, context: float) -> float:
    """γ·c + v: a round of drafting and verifying, in target steps of one row."""
    drafting = num_draft_tokens * draft_cost(target, draft, context)
    return drafting + target.verify_cost(num_draft_tokens + 1, context)


def break_even(num_draft_tokens: int, cost: float) -> float | None:
    """The least acceptance rate at which a round of `cost` target steps pays; None where even 1 does not."""
    if acceptance_length(1.0, num_draft_tokens) <= cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # τ grows with the rate; 50 halvings exhaust a float's digits
        middle = (low + high) / 2
        if acceptance_length(middle, num_draft_tokens) < cost:
            low = middle
        else:
            high = middle
    return high
