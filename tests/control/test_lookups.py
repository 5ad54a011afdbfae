"""What lookups are asked for, and when their proposals are worth the time of checking them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from slipstream.control.optimise import Priced, Problem
from slipstream.control.policy import MIN_AGE, Policy
from slipstream.control.types import NOTHING, Choice, DraftCall, PolicyDrafter, StepRequest
from tests.control.world import FakeClock

SIZE = 8
LOOKUP = PolicyDrafter("suffix", 8, is_chain=False, looks_up=True)
REQUESTS = [StepRequest(number, "t", limit=8, length=100) for number in range(SIZE)]


def pass_s(rows: float) -> float:
    return 0.001 + 0.0001 * rows


def observe(policy: Policy, checked: Seq[int], undrafted_s: float) -> None:
    """A step that has checked so many draft tokens of each request; nothing was chosen for it, and no call is known."""
    requests = [StepRequest(number, "t", limit=8, num_checked=own) for number, own in enumerate(checked)]
    rows = len(checked) + sum(checked)
    policy.observe(
        requests, [], num_rows=rows, num_prompt_rows=0, num_checked=sum(checked), undrafted_s=undrafted_s
    )


def teach(policy: Policy, *, drafted_s: float, accepted: float) -> None:
    """Steps that take `drafted_s` for each request with a draft; the lookup finds one token every time."""
    for step in range(120):
        drafted = step % (SIZE + 1)
        checked = drafted * (1 + step % 4)
        rows = SIZE + checked
        seconds = pass_s(rows) + drafted_s * drafted
        own = [checked // max(drafted, 1)] * drafted + [0] * (SIZE - drafted)
        observe(policy, own, seconds)
    for number in range(400):
        policy.score(0, "t", 1, int(number * accepted % 1 + accepted >= 1))


@pytest.mark.parametrize(("drafted_s", "pays"), [(0.0, True), (0.0001, False)])
def test_a_proposal_must_also_pay_for_what_a_request_costs_that_has_one(drafted_s: float, pays: bool) -> None:
    policy = Policy([LOOKUP], adaptive=True, probe_share=0.0, pass_s=pass_s)
    teach(policy, drafted_s=drafted_s, accepted=0.6)
    without, with_drafts = (policy.step_cost.step_s(SIZE, SIZE, drafted, 0) for drafted in (0, SIZE))
    assert (with_drafts - without) / SIZE == pytest.approx(drafted_s, rel=0.5, abs=1e-6)
    choices = policy.choose(REQUESTS, 0)
    assert all((choice.lookup == 0) == pays for choice in choices)
    assert all((choice != NOTHING) == pays for choice in choices)


CHAIN = PolicyDrafter("draft_model", 4, is_chain=True, looks_up=False)


def with_a_chain() -> Policy:
    """Lookups that pay, and a draft model whose cost is known."""
    clock = FakeClock(1e-9)  # searches cost nothing
    policy = Policy([LOOKUP, CHAIN], adaptive=True, probe_share=0.0, pass_s=pass_s, clock=clock)
    teach(policy, drafted_s=0.0, accepted=0.6)
    for number in range(1, 9):
        policy.draft_costs[1].learn(DraftCall(number, 2, 2 * number, seconds=0.0001 * number), 0)
    return policy


def promise(better: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the best plan be drafts for everybody, so much better than lookups alone."""
    best = Problem.best

    def promised(problem: Problem, *, with_drafters: bool = True) -> Priced:
        alone = best(problem, with_drafters=False)
        if not with_drafters:
            return alone
        drafts = problem.price(np.full(SIZE, problem.place_of(Choice(1, 2))))
        return drafts._replace(tokens_per_s=better * alone.tokens_per_s)

    monkeypatch.setattr(Problem, "best", promised)


@pytest.mark.parametrize(("better", "is_asked"), [(1.03, False), (1.2, True)])
def test_a_drafter_must_be_clearly_better_than_lookups_alone(
    better: float, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = with_a_chain()
    promise(better, monkeypatch)
    choices = policy.choose(REQUESTS, 0)
    assert all((choice.drafter == 1) == is_asked for choice in choices)
    assert is_asked or all(choice.lookup == 0 for choice in choices)


def test_a_drafter_that_is_asked_stays_while_it_is_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = with_a_chain()
    for better in (1.2, 1.03):
        promise(better, monkeypatch)
        searches = 0
        for _ in range(MIN_AGE + 1):
            choices = policy.choose(REQUESTS, 0)
            searches += policy.planning_s > 0
            observe(policy, [0] * SIZE, pass_s(SIZE))
        assert searches
        assert all(choice.drafter == 1 for choice in choices)


def test_a_drafter_of_unknown_cost_is_asked_for_one_request_without_a_budget() -> None:
    policy = Policy([LOOKUP, CHAIN], adaptive=True, probe_share=0.0, pass_s=lambda rows: 0.02)
    assert [choice.drafter for choice in policy.choose(REQUESTS, 0)].count(1) == 1


@pytest.mark.parametrize(("step_s", "scored"), [(0.04, True), (0.0005, False)])
def test_beside_long_steps_a_lookup_is_scored_without_waiting_for_credit(step_s: float, scored: bool) -> None:
    policy = Policy([LOOKUP, CHAIN], adaptive=True, probe_share=0.005, pass_s=lambda rows: step_s)
    for _ in range(8):
        policy.draft_costs[0].learn(DraftCall(1, 1, 1, seconds=0.00005), 0)
        observe(policy, [0], step_s)
    policy.budget.charge("trial", 1.0)  # owed for trials
    spent_s = policy.budget.spent_s
    assert policy.may_score(0) == scored
    assert (policy.budget.spent_s > spent_s) == scored
