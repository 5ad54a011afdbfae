"""What a policy says of itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.control.cost import DraftCost, StepCost
from slipstream.control.policy import Policy
from slipstream.control.traffic import TaskUse
from slipstream.control.types import (
    NO_DRAFTER,
    NOTHING,
    Choice,
    ControlReport,
    DraftCall,
    PolicyDrafter,
    TaskReport,
)


def control_report(policy: Policy, num_failures: Seq[int] = (), retired: Seq[bool] = ()) -> ControlReport:
    """What is known now; `num_failures` and `retired` are by drafter."""
    policy.learn()
    plan, alone, budget, realised = policy.plan, policy.alone, policy.budget, policy.probes.realised
    return ControlReport(
        adaptive=policy.adaptive,
        speculating=plan.drafts and not plan.withheld,
        stands_back=plan.withheld,
        estimated_speedup=1.0 if alone.withheld else alone.gain,
        realised=realised.speedup(),
        probe_share=budget.spent_s / budget.total_s if budget.total_s else 0.0,
        methods=tuple(policy.traffic.method_reports(num_failures, retired)),
        tasks=tuple(_task_report(policy, task, use) for task, use in policy.traffic.tasks()),
        depth_by_batch=tuple((n, mean.value) for n, mean in sorted(policy.depth_by_batch.items())),
        num_pairs=realised.num_pairs(),
        next_probe_s=_next_probe_s(policy),
    )


def _next_probe_s(policy: Policy) -> float | None:
    """Seconds of steps until the next probe can be paid; None where nothing is drafted, or nothing is probed."""
    plan = policy.plan
    price_s = policy.probe_price_s(plan, max(len(plan.by_sequence), 1))
    return policy.budget.wait_s("probe", price_s) if plan.drafts else None


def _task_report(policy: Policy, task: str, use: TaskUse) -> TaskReport:
    plan, realised = policy.alone, policy.probes.realised
    choice = NOTHING if plan.withheld else plan.for_task(task)
    drafter = choice.lookup if choice.drafter == NO_DRAFTER else choice.drafter
    rates = [each.rate(task) for each in policy.traffic.acceptance]
    known = [rate for rate in rates if rate is not None]
    traits, number = policy.drafters[max(drafter, 0)], max(len(plan.by_sequence), 1)
    depth = _usual_depth(choice, traits.is_chain, use)
    return TaskReport(
        task=task,
        method=None if drafter == NO_DRAFTER else policy.drafters[drafter].name,
        depth=use.depth.value if choice.drafts else 0.0,
        acceptance_rate=rates[drafter] if drafter != NO_DRAFTER else max(known, default=None),
        acceptance_length=use.tokens.value if choice.drafts else 1.0,
        break_even=_break_even(traits, policy.draft_costs[max(drafter, 0)], policy.step_cost, depth, number),
        estimated_speedup=1.0 if plan.withheld else plan.gains.get(task),
        realised=realised.speedup(task),
        num_requests=use.num_requests,
        num_pairs=realised.num_pairs(task),
    )


def _usual_depth(choice: Choice, is_chain: bool, use: TaskUse) -> int:
    """Draft tokens that a step with this choice checks; 1 without drafts."""
    if choice.drafter == NO_DRAFTER:
        return max(choice.min_tokens, 1)
    return max(choice.depth if is_chain else round(use.depth.value), 1)


def _break_even(
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
    draft_s = draft_cost(DraftCall(number, depth if drafter.is_chain else 1, num_tokens))
    step_s = step_cost.step_s(number, number + num_tokens, number, num_tokens) + draft_s
    rate = max(float(step_s / plain_s) - 1.0, 0.0) / depth
    return rate if rate < 1 else None
