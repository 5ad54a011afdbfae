"""What is compared, in which order it is bet on, what may reject, and what is claimed of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from slipstream.core.meter import Meter, meter
from slipstream.rpc.client import ServerAddress
from slipstream.tools.audit.claims import SmallestDeviations
from slipstream.tools.audit.decision import AuditDecision, Evidence, decide, level_of_tests, probe_level
from slipstream.tools.audit.findings import AuditCheck, AuditTest
from slipstream.tools.audit.identity import AnswerComparison, compare
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.audit.remote.sending import send_all
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.ties import Rounding

REQUESTS = [
    AuditRequest(number, 0, "chat", {"temperature": 0.8}, 8, seed=number, text="?") for number in range(12)
]


class Late(ServerSide):
    """A server in this process whose first answers take the longest; request 3 fails."""

    async def send(self, client: Any, request: AuditRequest, stream: bool = False) -> AuditReply:
        for _ in range(3 * (len(REQUESTS) - request.number)):
            await asyncio.sleep(0)
        return AuditReply(request.number, error="gone" if request.number == 3 else None)


@pytest.mark.parametrize("last", [7, 99])
def test_replies_are_handed_over_in_the_order_of_the_requests(last: int) -> None:
    """Bets on pairs in the order in which they come would know which answers are short."""
    address = ServerAddress("http://127.0.0.1:9/v1", "m", "", timeout_s=1)
    sides = [Late(name, address) for name in ("audited", "against")]
    journal, seen, came = AuditJournal(), list[int](), list[int]()
    add = journal.add

    def note(side: str, reply: AuditReply) -> None:
        came.append(reply.request)
        add(side, reply)

    journal.add = note  # type: ignore[method-assign]

    def on_replies(request: AuditRequest, replies: list[AuditReply]) -> bool:
        assert [reply.request for reply in replies] == [request.number] * 2
        seen.append(request.number)
        return request.number == last

    async def ask(shown: Meter) -> str:
        return await send_all(sides, REQUESTS, 4, journal, shown, on_replies)

    with meter("audit", 24) as shown:
        assert asyncio.run(ask(shown)) == ""
    assert came != sorted(came), "else this shows nothing"
    assert seen == [number for number in range(12) if number != 3 and number <= last]


def compared(mine: AuditAnswer, theirs: AuditAnswer, tells: bool = True) -> AnswerComparison:
    replies = ({0: AuditReply(0, [answer])} for answer in (mine, theirs))
    check = AuditCheck("same tokens", "")
    return compare({0: REQUESTS[0]}, *replies, lambda *_: None, 0.0, check, lambda request, one, other: tells)


def test_texts_count_as_their_tokens_and_not_as_their_characters() -> None:
    text = "twenty-four characters.."
    whole = compared(AuditAnswer(text=text, num_tokens=6), AuditAnswer(text=text))
    assert whole.num_tokens == whole.num_told_tokens == 6
    half = compared(AuditAnswer(text=text, num_tokens=6), AuditAnswer(text=text[:11] + "?"))
    assert half.num_tokens == 3
    assert compared(AuditAnswer(text=text), AuditAnswer(text=text)).num_tokens == 3, "nothing counts them"
    ids = AuditAnswer(token_ids=[1, 2, 3, 4])
    assert compared(ids, AuditAnswer(token_ids=[1, 9, 3, 4])).num_tokens == 2
    blind = compared(ids, ids, tells=False)
    assert (blind.num_tokens, blind.num_told, blind.num_told_tokens) == (4, 0, 0)


def test_answers_whose_differences_rounding_may_excuse_are_not_claimed() -> None:
    identity = AnswerComparison(AuditCheck("same tokens", "", num_compared=100), [], 6400, 20, 1280)
    shares = {}
    for noise in (0.0, 1e-3):
        smallest = SmallestDeviations(0.99, 64)
        smallest.add_identity(identity, Rounding(np.full(50, noise)))
        shares[noise] = smallest.as_json()["share_of_answers"]
        claim = smallest.claim(True, "the other")
        assert ("of the 20 answers that were compared token for token and tell margins" in claim) == (
            noise > 0
        )
    assert shares[0.0] == pytest.approx(1 - 0.01**0.01)
    assert shares[1e-3] == pytest.approx(1 - 0.01**0.05)
    nothing = SmallestDeviations(0.99, 64)
    identity.num_told = identity.num_told_tokens = 0
    nothing.add_identity(identity, Rounding(np.full(50, 1e-3)))
    assert nothing.as_json() == {}


def test_the_tests_and_the_probe_of_seeds_share_the_chance_of_a_false_alarm() -> None:
    assert probe_level(0.01) + 4 * level_of_tests(0.01) == pytest.approx(0.01)
    for num_tests in (1, 4):
        for factor, decision in ((0.99, AuditDecision.NOT_CERTIFIED), (1.01, AuditDecision.CERTIFIED)):
            p_value = factor * level_of_tests(0.01)
            tests = [AuditTest("samples", "", p_value, {}, "something")] * num_tests
            assert decide(Evidence([], tests, decided_by=("samples",)), 0.01)[0] is decision
