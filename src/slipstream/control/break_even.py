"""From which acceptance rate on a task's drafts pay, by the costs of this engine's own steps."""

from __future__ import annotations

from slipstream.control.cost import DraftCost, StepCost
from slipstream.control.traffic import TaskUse
from slipstream.control.types import NOBODY, Choice, Drafted, PolicyDrafter


def usual_depth(choice: Choice, is_chain: bool, use: TaskUse) -> int:
    """Draft tokens that a step with this choice checks; 1 without drafts."""
    if choice.drafter == NOBODY:
        return max(choice.min_tokens, 1)
    return max(choice.depth if is_chain else round(use.depth.value), 1)


def break_even(
    drafter: PolicyDrafter, draft_cost: DraftCost, step_cost: StepCost, depth: int, number: int
) -> float | None:
    """The share of draft tokens that must be accepted for `depth` of them to pay for each of `number` requests.

    A step yields 1 + α·depth tokens a request, so this holds however acceptance falls off with the position. None
    before the costs are known, or where no share pays.
    """
    plain_s = step_cost.step_s(number, number, 0, 0)
    if plain_s <= 0 or not draft_cost.is_known:
        return None
    num_tokens = number * depth
    draft_s = draft_cost(Drafted(number, depth if drafter.is_chain else 1, num_tokens))
    step_s = step_cost.step_s(number, number + num_tokens, number, num_tokens) + draft_s
    rate = max(float(step_s / plain_s) - 1.0, 0.0) / depth
    return rate if rate < 1 else None
