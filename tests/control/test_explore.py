"""Trials and the budget that they share with probes."""

from __future__ import annotations

import pytest

from slipstream.control.budget import MAX_CREDIT_STEPS, Budget
from slipstream.control.cost import Mean
from slipstream.control.trials import MAX_TRIAL_STEPS, NUM_TRIAL_STEPS, Trials
from slipstream.control.types import Choice, StepRequest
from tests.control.world import drafted

REQUESTS = [StepRequest(number, "t", limit=8) for number in range(3)]


def num_steps(accepted: int, expected: float) -> int:
    """Steps of a trial in which so many tokens are accepted each time."""
    trials = Trials()
    trials.begin(REQUESTS[1], [Choice(0, 1)] * NUM_TRIAL_STEPS, step=1)
    for step in range(100):
        found = trials.choice(REQUESTS)
        if found is None:
            return step
        assert found == (1, Choice(0, 1))
        outcome = trials.outcome([drafted(1, 1, accepted)])
        assert outcome is not None
        trials.goes_on(outcome, expected)
    return 100


@pytest.mark.parametrize(
    ("accepted", "expected", "steps"),
    [(0, 0.1, NUM_TRIAL_STEPS), (1, 0.9, NUM_TRIAL_STEPS), (1, 0.1, MAX_TRIAL_STEPS)],
)
def test_a_trial_goes_on_while_more_is_accepted_than_expected(
    accepted: int, expected: float, steps: int
) -> None:
    assert num_steps(accepted, expected) == steps


def test_a_trial_ends_with_its_request() -> None:
    trials = Trials()
    trials.begin(REQUESTS[1], [Choice(0, 1)] * NUM_TRIAL_STEPS, step=7)
    assert trials.under_way
    assert trials.choice(REQUESTS[:1]) is None
    assert not trials.under_way
    assert trials.outcome([drafted(1, 1, 1)]) is None
    assert trials.age("t", 0, 10) == 3
    assert trials.age("other", 0, 10) > 1000


def make(share: float) -> Budget:
    step_s = Mean()
    step_s.learn(1.0)
    return Budget(share, step_s)


def test_whichever_kind_has_cost_less_comes_first() -> None:
    budget = make(0.1)
    for _ in range(100):
        budget.earn(1.0)
    budget.pay("trial", 4.0)
    assert budget.can_pay("probe", 5.0)
    assert not budget.can_pay("trial", 2.0), "credit for the probe is kept"
    budget.withdraw("probe")
    assert budget.can_pay("trial", 2.0)
    budget.pay("probe", 5.0)
    assert budget.can_pay("trial", 0.5)
    assert budget.spent_s == pytest.approx(9.0)


def test_credit_is_bounded_and_what_is_owed_is_paid_off_first() -> None:
    budget = make(0.5)
    for _ in range(10 * MAX_CREDIT_STEPS):
        budget.earn(1.0)
    assert budget.credit_s == MAX_CREDIT_STEPS
    assert budget.can_pay("probe", 1e9), "what costs more than can be saved up is owed"
    budget.pay("probe", MAX_CREDIT_STEPS + 10.0)
    for _ in range(20):
        assert not budget.can_pay("trial", 0.0)
        budget.earn(1.0)
    budget.earn(1.0)
    assert budget.can_pay("trial", 0.1)


def test_without_a_share_nothing_can_be_paid() -> None:
    budget = make(0.0)
    budget.earn(1e9)
    assert not budget.can_pay("trial", 0.0)
