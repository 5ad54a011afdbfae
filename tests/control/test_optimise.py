"""The best plan against every plan there is, and prices by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from slipstream.control.acceptance import BUCKETS
from slipstream.control.cost import MIN_CALLS, DraftCost, StepCost
from slipstream.control.optimise import Curve, LookupCurve, Priced, Problem, Row
from slipstream.control.types import NO_DRAFTER, NOTHING, Choice, DraftCall


def draft_cost(call_s: float, level_s: float, token_s: float) -> DraftCost:
    """One that has learned these parts from exact times."""
    cost = DraftCost(10.0)
    shapes = [(n, d, n * d) for n in (1, 2, 4) for d in (1, 2, 3)] + [(2, 3, 4), (3, 2, 5)]
    for _ in range(20):
        for shape in shapes:
            _, levels, num_tokens = shape
            cost.learn(DraftCall(*shape, seconds=call_s + level_s * levels + token_s * num_tokens), 0)
    return cost


def curve(survival: list[float], entry_s: float = 0.0) -> Curve:
    """Make the curve of a chain whose tokens are accepted down to each position with these chances."""
    return Curve(list(itertools.accumulate(survival)), range(1, len(survival) + 1), entry_s)


def rows(*survival: list[list[float]]) -> list[Row]:
    """By drafter, then by request; shorter lists are lower limits, an empty one is a drafter that it may not have."""
    return [
        Row({number: curve(of[i]) for number, of in enumerate(survival) if of[i]}, {})
        for i in range(len(survival[0]))
    ]


def price(problem: Problem, *choices: Choice) -> Priced:
    return problem.price(np.array([problem.place_of(choice) for choice in choices]))


def chosen(problem: Problem, plan: Priced) -> list[Choice]:
    return [problem.options[place] for place in plan.places.tolist()]


def brute_force(problem: Problem, requests: list[Row]) -> float:
    """Tokens a second of the best of all plans."""
    possible = [
        [place for place, each in enumerate(problem.options) if each == NOTHING or problem.offers(i, each)]
        for i in range(len(requests))
    ]
    return max(problem.price(np.array(plan)).tokens_per_s for plan in itertools.product(*possible))


def test_a_price_is_tokens_over_seconds() -> None:
    """Two drafted for, one not: the pass by its rows, the call by its deepest level, the text that was missed."""
    cost = draft_cost(1.0, 2.0, 0.5)
    requests = [Row({0: curve([0.5, 0.25])}, {}), Row({0: curve([0.8], 3.0)}, {}), Row({0: curve([0.9])}, {})]
    problem = Problem(requests, StepCost(lambda rows: 10.0 + rows), [cost])
    plan = price(problem, Choice(0, 2), Choice(0, 1), NOTHING)
    assert plan.step_s == pytest.approx(10 + 3 + 3 + (1 + 2 * 2 + 0.5 * 3) + 3, rel=0.01)
    assert plan.tokens_per_s == pytest.approx((3 + 0.75 + 0.8) / plan.step_s)


def test_nothing_is_one_token_a_request() -> None:
    problem = Problem([Row({}, {})] * 4, StepCost(lambda rows: 0.5 * rows), [])
    assert problem.nothing().tokens_per_s == pytest.approx(2.0)
    assert problem.best().tokens_per_s == pytest.approx(2.0)
    assert chosen(problem, problem.best()) == [NOTHING] * 4


def test_prompts_fill_the_pass_but_their_time_is_their_own() -> None:
    """A long prompt in the step must not make drafts look cheap: they do not make it shorter."""

    def pass_s(rows: float) -> float:
        return max(10.0, rows)

    costs = [draft_cost(0.1, 0.1, 0.1)]
    idle = Problem(rows([[0.6]] * 4), StepCost(pass_s), costs)
    busy = Problem(rows([[0.6]] * 4), StepCost(pass_s), costs, 100.0)
    assert busy.nothing().step_s == pytest.approx(idle.nothing().step_s)
    drafted = [Choice(0, 1)] * 4
    assert price(busy, *drafted).step_s == pytest.approx(price(idle, *drafted).step_s + 4, rel=0.02)


def test_lookups_are_asked_first_and_the_draft_is_for_what_they_leave() -> None:
    found = LookupCurve(*(np.array([each] * (len(BUCKETS) - 1)) for each in (0.25, 0.8, 1.0)))
    costs = [draft_cost(0.0, 0.0, 0.2), draft_cost(1.0, 0.0, 0.0)]
    problem = Problem([Row({1: curve([0.6])}, {0: found})] * 2, StepCost(lambda rows: 10.0 + rows), costs)
    plan = price(problem, *[Choice(1, 1, 0, 4)] * 2)
    assert plan.step_s == pytest.approx(12 + 2 * 1.0 + 1.5 + 2 * 0.2 + 1.0, rel=0.02)
    assert plan.tokens_per_s == pytest.approx((2 + 2 * 0.8 + 1.5 * 0.6) / plan.step_s)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_is_nearly_that_of_brute_force(seed: int) -> None:
    """Random acceptance, limits and costs; never worse than nothing, never beyond a limit."""
    source = random.Random(seed)
    number, num_drafters = source.randint(1, 4), source.randint(1, 2)
    curves: list[dict[int, Curve]] = [{} for _ in range(number)]
    costs = []
    for drafter in range(num_drafters):
        limits = []
        for _ in range(number):
            alpha, limit = source.random(), source.choice([0, 1, 2, 3, 3])
            limits.append([alpha**level for level in range(1, limit + 1)])
        level_s = source.choice([0.02, 0.1, 0.3])
        for i, survival in enumerate(limits):
            entry_s = source.choice([0.0, 0.0, 0.5])
            if survival:
                curves[i][drafter] = curve(survival, entry_s)
        costs.append(draft_cost(source.choice([0.0, 0.1]), level_s, 0.01))
    row_s, other = source.choice([0.0, 0.05, 0.2]), source.choice([0.0, 5.0])
    requests = [Row(each, {}) for each in curves]
    problem = Problem(requests, StepCost(lambda rows: 1.0 + row_s * rows), costs, other)
    best = problem.best()
    assert best.tokens_per_s >= problem.nothing().tokens_per_s
    for i, choice in enumerate(chosen(problem, best)):
        assert choice == NOTHING or problem.offers(i, choice)
        assert (choice.drafter == NO_DRAFTER) == (choice.depth == 0)
    assert best.tokens_per_s == pytest.approx(problem.price(best.places).tokens_per_s)
    assert best.tokens_per_s >= 0.95 * brute_force(problem, requests)


def test_requests_get_what_suits_each() -> None:
    """Neither all nor none: of two kinds of requests each has its own drafter."""
    requests = rows(
        [[0.95, 0.9, 0.85]] * 4 + [[0.05, 0.0, 0.0]] * 4,
        [[0.1, 0.0, 0.0]] * 4 + [[0.9, 0.8, 0.7]] * 4,
    )
    costs = [draft_cost(0.0, 0.01, 0.0), draft_cost(0.0, 0.02, 0.0)]
    problem = Problem(requests, StepCost(lambda rows: 1.0 + 0.02 * rows), costs)
    assert chosen(problem, problem.best()) == [Choice(0, 3)] * 4 + [Choice(1, 3)] * 4


def test_a_draft_where_nothing_pays_is_not_made() -> None:
    problem = Problem(rows([[0.3, 0.1]] * 3), StepCost(lambda rows: 0.1 + rows), [draft_cost(0.1, 0.5, 0.0)])
    assert chosen(problem, problem.best()) == [NOTHING] * 3


def test_text_that_must_be_computed_first_is_charged() -> None:
    for entry_s, pays in [(0.0, True), (5.0, False)]:
        problem = Problem(
            [Row({0: curve([0.9], entry_s)}, {})], StepCost(lambda rows: 1.0), [draft_cost(0.0, 0.05, 0.0)]
        )
        [choice] = chosen(problem, problem.best())
        assert choice.drafts == pays


def test_what_a_choice_costs_beyond_its_yield() -> None:
    """A row at the price of the pass, the call, and what is yielded at the rate of the plan."""
    cost = draft_cost(1.0, 2.0, 0.5)
    problem = Problem(rows([[0.5]] * 4), StepCost(lambda rows: 10.0 + 0.25 * rows), [cost])
    nothing = problem.nothing()
    extra_s = problem.extra_s(nothing, 0, Choice(0, 1))
    assert extra_s == pytest.approx(0.25 + 3.5 - 0.5 / nothing.tokens_per_s, rel=0.02)
    free = Problem(rows([[0.5]] * 4), StepCost(lambda rows: 10.0), [draft_cost(0.0, 0.0, 0.0)])
    assert free.extra_s(free.nothing(), 0, Choice(0, 1)) == 0, "what pays costs nothing"


def test_a_choice_that_is_no_option_any_more_is_the_nearest_one() -> None:
    found = LookupCurve(*(np.zeros(len(BUCKETS) - 1) for _ in range(3)))
    problem = Problem(
        [Row({1: curve([0.5, 0.2])}, {0: found})], StepCost(lambda rows: 1.0), [DraftCost(1.0)] * 3
    )
    for before, now in [
        (Choice(1, 9, 0, 4), Choice(1, 2, 0, 4)),
        (Choice(1, 1), Choice(1, 1)),
        (Choice(2, 3, 0, 2), Choice(lookup=0, min_tokens=2)),
        (Choice(1, 1, 2, 2), Choice(1, 1)),
        (NOTHING, NOTHING),
    ]:
        assert problem.options[problem.place_of(before)] == now


def test_drafters_that_cost_nothing_and_requests_without_limit_do_not_raise() -> None:
    assert MIN_CALLS > 0
    problem = Problem([Row({}, {})] * 2, StepCost(lambda rows: 1.0), [DraftCost(1.0)])
    assert chosen(problem, problem.best()) == [NOTHING] * 2
    unknown = Problem(rows([[0.5]]), StepCost(lambda rows: 1e-9), [DraftCost(1.0)])
    assert unknown.best().tokens_per_s > 0
