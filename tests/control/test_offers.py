"""What lookups are asked for, and when their guesses are worth the time of checking them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from slipstream.control.choice import Asked, Member
from slipstream.control.controller import Controller
from slipstream.control.knowledge import Knowledge
from slipstream.control.offers import guesses, offer
from slipstream.control.plan import Guesses, Market, Plan
from slipstream.control.step_cost import Drafted
from slipstream.draft.choice import NOBODY, NOTHING

SIZE = 8
LOOKUP = Member("suffix", 8, is_chain=False, looks_up=True)
ASKED = [Asked(number, "t", limit=8, length=100) for number in range(SIZE)]


def pass_s(rows: float) -> float:
    return 0.001 + 0.0001 * rows


def teach(known: Knowledge, *, drafted_s: float, stands: float) -> None:
    """Steps that take `drafted_s` for each request with a draft; the lookup finds one token every time."""
    for step in range(120):
        drafted = step % (SIZE + 1)
        checked = drafted * (1 + step % 4)
        rows = SIZE + checked
        seconds = pass_s(rows) + drafted_s * drafted
        known.cost.learn(num_sequences=SIZE, num_rows=rows, drafted=drafted, checked=checked, seconds=seconds)
    for number in range(400):
        known.score(0, "t", 1, int(number * stands % 1 + stands >= 1))


@pytest.mark.parametrize(("drafted_s", "pays"), [(0.0, True), (0.0001, False)])
def test_a_guess_must_also_pay_for_what_a_request_costs_that_has_one(drafted_s: float, pays: bool) -> None:
    controller = Controller([LOOKUP], adaptive=True, probe_share=0.0, pass_s=pass_s)
    known = controller.known
    teach(known, drafted_s=drafted_s, stands=0.6)
    market = Market([offer(known, 0, ASKED)], known.cost, SIZE, 0.0)
    assert market.marginal(market.nothing()).drafted_s == pytest.approx(drafted_s, rel=0.5, abs=1e-6)
    found = guesses(known, ASKED, market, market.nothing())
    assert {lookup for lookup, _ in found.choices} == {0 if pays else NOBODY}
    choices = controller.choose(ASKED, 0)
    assert all((choice != NOTHING) == pays for choice in choices)


CHAIN = Member("draft_model", 4, is_chain=True, looks_up=False)


def with_a_chain() -> Controller:
    """Lookups that pay, and a draft model whose cost is known."""
    controller = Controller([LOOKUP, CHAIN], adaptive=True, probe_share=0.0, pass_s=pass_s)
    teach(controller.known, drafted_s=0.0, stands=0.6)
    for number in range(1, 9):
        controller.known.draft_costs[1].learn(Drafted(number, 2, 2 * number), 0, 0.0001 * number)
    return controller


def promise(better: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the best plan be drafts for everybody, so much better than lookups alone."""

    def best(market: Market, look: Callable[[Plan], Guesses]) -> Plan:
        lookups = market.nothing(look(market.nothing())).tokens_per_s
        plan = market.price(np.full(SIZE, 1), np.full(SIZE, 2))
        return replace(plan, tokens_per_s=better * lookups)

    monkeypatch.setattr(Market, "best", best)


@pytest.mark.parametrize(("better", "is_asked"), [(1.03, False), (1.2, True)])
def test_a_drafter_must_be_clearly_better_than_lookups_alone(
    better: float, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = with_a_chain()
    promise(better, monkeypatch)
    choices = controller.choose(ASKED, 0)
    assert all((choice.drafter == 1) == is_asked for choice in choices)
    assert is_asked or all(choice.lookup == 0 for choice in choices)


def test_a_drafter_that_is_asked_stays_while_it_is_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = with_a_chain()
    for better in (1.2, 1.03):
        promise(better, monkeypatch)
        controller._plan.held_s = 0.0
        assert all(choice.drafter == 1 for choice in controller.choose(ASKED, 0))


def test_a_drafter_of_unknown_cost_is_asked_for_one_request_without_tries() -> None:
    controller = Controller([LOOKUP, CHAIN], adaptive=True, probe_share=0.0, pass_s=lambda rows: 0.02)
    assert [choice.drafter for choice in controller.choose(ASKED, 0)].count(1) == 1
