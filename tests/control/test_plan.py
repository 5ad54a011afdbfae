"""The best plan against every plan there is, and prices by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from slipstream.control.plan import Market, Offer
from slipstream.control.step_cost import MIN_CALLS, DraftCost, Drafted, StepCost
from slipstream.draft.choice import NOBODY


def draft_cost(call_s: float, level_s: float, token_s: float) -> DraftCost:
    """One that has learned these parts from exact times."""
    cost = DraftCost(10.0)
    shapes = [(n, d, n * d) for n in (1, 2, 4) for d in (1, 2, 3)] + [(2, 3, 4), (3, 2, 5)]
    for _ in range(20):
        for shape in shapes:
            drafted = Drafted(*shape)
            cost.learn(drafted, 0, call_s + level_s * drafted.num_levels + token_s * drafted.num_tokens)
    return cost


def offer(survival: list[list[float]], cost: DraftCost, entry_s: list[float] | None = None) -> Offer:
    """By request, the chance that a chain stands to each position; shorter lists are lower limits."""
    depth = max(map(len, survival), default=0)
    tokens = np.full((len(survival), depth + 1), -np.inf)
    rows = np.zeros((len(survival), depth + 1))
    for i, chances in enumerate(survival):
        tokens[i, : len(chances) + 1] = [0.0, *itertools.accumulate(chances)]
        rows[i, : len(chances) + 1] = range(len(chances) + 1)
    return Offer(tokens, rows, np.array(entry_s or [0.0] * len(survival)), cost)


def brute_force(market: Market, offers: list[Offer], number: int) -> float:
    """Tokens a second of the best of all plans."""
    choices = [
        [(NOBODY, 0)]
        + [
            (member, depth)
            for member, each in enumerate(offers)
            for depth in range(1, each.max_depth + 1)
            if np.isfinite(each.tokens[i, depth])
        ]
        for i in range(number)
    ]
    return max(
        market.price(np.array([m for m, _ in plan]), np.array([d for _, d in plan])).tokens_per_s
        for plan in itertools.product(*choices)
    )


def test_a_price_is_tokens_over_seconds() -> None:
    """Two drafted for, one not: the pass by its rows, the call by its deepest level, the text that was missed."""
    cost = draft_cost(1.0, 2.0, 0.5)
    chains = offer([[0.5, 0.25], [0.8], [0.9, 0.9]], cost, [0.0, 3.0, 0.0])
    market = Market([chains], StepCost(lambda rows: 10.0 + rows), 3, 0.0)
    plan = market.price(np.array([0, 0, NOBODY]), np.array([2, 1, 0]))
    assert plan.step_s == pytest.approx(10 + 3 + 3 + (1 + 2 * 2 + 0.5 * 3) + 3, rel=0.01)
    assert plan.tokens_per_s == pytest.approx((3 + 0.75 + 0.8) / plan.step_s)


def test_nothing_is_one_token_a_request() -> None:
    market = Market([], StepCost(lambda rows: 0.5 * rows), 4, 0.0)
    plan = market.nothing()
    assert plan.tokens_per_s == pytest.approx(2.0)
    assert market.best().tokens_per_s == pytest.approx(2.0)
    assert set(plan.members) == {NOBODY}


def test_prompts_fill_the_pass_but_their_time_is_their_own() -> None:
    """A long prompt in the step must not make drafts look cheap: they do not make it shorter."""

    def pass_s(rows: float) -> float:
        return max(10.0, rows)

    chains = offer([[0.6]] * 4, draft_cost(0.1, 0.1, 0.1))
    idle = Market([chains], StepCost(pass_s), 4, 0.0)
    busy = Market([chains], StepCost(pass_s), 4, 100.0)
    assert busy.nothing().step_s == pytest.approx(idle.nothing().step_s)
    drafted = np.zeros(4, dtype=int), np.ones(4, dtype=int)
    assert busy.price(*drafted).step_s == pytest.approx(idle.price(*drafted).step_s + 4, rel=0.02)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_is_nearly_that_of_brute_force(seed: int) -> None:
    """Random acceptance, limits and costs; never worse than nothing, never beyond a limit."""
    source = random.Random(seed)
    number, num_members = source.randint(1, 4), source.randint(1, 2)
    offers = []
    for _ in range(num_members):
        chances = []
        for _ in range(number):
            alpha, limit = source.random(), source.choice([0, 1, 2, 3, 3])
            chances.append([alpha**level for level in range(1, limit + 1)])
        level_s = source.choice([0.02, 0.1, 0.3])
        entry_s = [source.choice([0.0, 0.0, 0.5]) for _ in range(number)]
        offers.append(offer(chances, draft_cost(source.choice([0.0, 0.1]), level_s, 0.01), entry_s))
    row_s, other = source.choice([0.0, 0.05, 0.2]), source.choice([0.0, 5.0])
    market = Market(offers, StepCost(lambda rows: 1.0 + row_s * rows), number, other)
    best = market.best()
    assert best.tokens_per_s >= market.nothing().tokens_per_s
    for i, (member, depth) in enumerate(zip(best.members, best.depths, strict=True)):
        assert (member == NOBODY) == (depth == 0)
        assert member == NOBODY or np.isfinite(offers[member].tokens[i, depth])
    assert best.tokens_per_s == pytest.approx(market.price(best.members, best.depths).tokens_per_s)
    assert best.tokens_per_s >= 0.95 * brute_force(market, offers, number)


def test_requests_get_what_suits_each() -> None:
    """Neither all nor none: of two kinds of requests each has its own drafter."""
    cheap, dear = draft_cost(0.0, 0.01, 0.0), draft_cost(0.0, 0.02, 0.0)
    offers = [
        offer([[0.95, 0.9, 0.85]] * 4 + [[0.05, 0.0, 0.0]] * 4, cheap),
        offer([[0.1, 0.0, 0.0]] * 4 + [[0.9, 0.8, 0.7]] * 4, dear),
    ]
    market = Market(offers, StepCost(lambda rows: 1.0 + 0.02 * rows), 8, 0.0)
    best = market.best()
    assert best.members.tolist() == [0] * 4 + [1] * 4
    assert best.depths.tolist() == [3] * 8


def test_a_draft_where_nothing_pays_is_not_made() -> None:
    offers = [offer([[0.3, 0.1]] * 3, draft_cost(0.1, 0.5, 0.0))]
    best = Market(offers, StepCost(lambda rows: 0.1 + rows), 3, 0.0).best()
    assert set(best.members) == {NOBODY}


def test_text_that_must_be_computed_first_is_charged() -> None:
    free = offer([[0.9]], draft_cost(0.0, 0.05, 0.0), [0.0])
    dear = offer([[0.9]], draft_cost(0.0, 0.05, 0.0), [5.0])
    cost = StepCost(lambda rows: 1.0)
    assert Market([free], cost, 1, 0.0).best().members.tolist() == [0]
    assert Market([dear], cost, 1, 0.0).best().members.tolist() == [NOBODY]


def test_marginal_cost_is_that_of_one_more_row() -> None:
    cost = draft_cost(1.0, 2.0, 0.5)
    market = Market([offer([[0.5]] * 4, cost)], StepCost(lambda rows: 10.0 + 0.25 * rows), 4, 0.0)
    plan = market.price(np.array([0, 0, NOBODY, NOBODY]), np.array([1, 1, 0, 0]))
    row_s, drafted_s, shares_s = market.marginal(plan)
    assert row_s == pytest.approx(0.25)
    assert drafted_s == 0
    assert shares_s == [pytest.approx((1 + 2 + 2 * 0.5) / 2, rel=0.01)]
    worth = 0.5 - plan.tokens_per_s * (0.25 + shares_s[0])
    assert market.values(plan) == [pytest.approx(worth)] * 2 + [0.0, 0.0]


def test_drafters_that_cost_nothing_and_requests_without_limit_do_not_raise() -> None:
    assert MIN_CALLS > 0
    unknown = offer([[], []], DraftCost(1.0))
    best = Market([unknown], StepCost(lambda rows: 1.0), 2, 0.0).best()
    assert set(best.members) == {NOBODY}
    nothing_known = Market([offer([[0.5]], DraftCost(1.0))], StepCost(lambda rows: 1e-9), 1, 0.0)
    assert nothing_known.best().tokens_per_s > 0
