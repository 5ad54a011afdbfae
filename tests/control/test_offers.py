"""What lookups are asked for, and when their guesses are worth the time of checking them."""

from __future__ import annotations

import pytest

from slipstream.control.choice import NOTHING, Asked, Member
from slipstream.control.controller import Controller
from slipstream.control.knowledge import Knowledge
from slipstream.control.offers import guesses, offer
from slipstream.control.plan import NOBODY, Market

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
