"""Whether servers draw with the same noise: never where they do not, however certain the model is."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.rpc.client import ServerAddress
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest, TokenTop
from slipstream.tools.audit.reference import draws_alike
from slipstream.tools.audit.remote import probing
from slipstream.tools.audit.remote.margins import counted_margin, reported_margin
from slipstream.tools.audit.remote.probing import probe_seeds
from slipstream.tools.audit.remote.side import ServerSide

LENGTH = 12
LEVEL = 0.001
REQUESTS = [
    AuditRequest(number, number, "chat", {"temperature": 1.0}, LENGTH, seed=1000 + number, text=str(number))
    for number in range(4)
]


def drawn(noise: object, seed: int, certainty: float, length: int = LENGTH) -> list[int]:
    """Tokens that are 0 with a probability of `certainty`."""
    chance = random.Random(f"{noise} {seed}")
    return [0 if chance.random() < certainty else chance.randrange(1, 5) for _ in range(length)]


class Drawing(ServerSide):
    """A server in this process with noise of its own; `wrong` of its tokens are others."""

    noise: object = 0
    certainty = 0.5
    wrong = 0.0

    async def send(self, client: Any, request: AuditRequest, stream: bool = False) -> AuditReply:
        tokens = drawn(self.noise, request.seed, self.certainty, request.max_tokens)
        chance = random.Random(f"wrong {self.noise} {request.seed}")
        tokens = [token if chance.random() >= self.wrong else 9 for token in tokens]
        return AuditReply(request.number, [AuditAnswer(text="".join(map(str, tokens)))])


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """These servers need no client, and to make one takes longer than to ask them."""
    monkeypatch.setattr(probing, "connect", lambda address: nullcontext())


def drawing(**behaviour: Any) -> Drawing:
    side = Drawing("audited", ServerAddress("http://127.0.0.1:9/v1", "m", "", timeout_s=1))
    for name, value in behaviour.items():
        setattr(side, name, value)
    return side


@pytest.mark.parametrize("certainty", [0.5, 0.9])
def test_servers_with_noise_of_their_own_do_not_pass_for_sharing_it(certainty: float) -> None:
    shared = 0
    for noise in range(150):
        sides = [drawing(noise=(noise, place), certainty=certainty) for place in range(2)]
        shared += probe_seeds(sides, REQUESTS, LEVEL)
        assert all(side.info.keeps_seed for side in sides)
    assert shared <= 1


@pytest.mark.parametrize("wrong", [0.0, 0.03])
def test_servers_with_the_same_noise_share_it_even_with_a_fault(wrong: float) -> None:
    sides = [drawing(wrong=wrong), drawing()]
    assert probe_seeds(sides, REQUESTS, LEVEL)
    assert not probe_seeds(sides, REQUESTS, 2.0**-21), "so few probes cannot show it so surely"


def test_a_server_alone_keeps_to_a_seed() -> None:
    assert probe_seeds([drawing()], REQUESTS, LEVEL)


class Replays:
    """A reference whose tokens are 0 with a probability of 0.95."""

    def replay(self, prompt: Any, answer: Any, params: Any, seed: int) -> SimpleNamespace:
        return SimpleNamespace(chosen=drawn("reference", seed, 0.95, len(answer)))


def test_a_certain_model_does_not_pass_for_the_references_noise() -> None:
    requests = [
        AuditRequest(number, 0, "chat", {"temperature": 0.8}, 64, seed=number * 7, token_ids=(1,))
        for number in range(20)
    ]

    def alike(noise: object) -> bool:
        replies = {
            request.number: AuditReply(
                request.number, [AuditAnswer(token_ids=drawn(noise, request.answer_seed(0), 0.95, 64))]
            )
            for request in requests
        }
        return draws_alike(Replays(), requests, replies, LEVEL)  # type: ignore[arg-type]

    assert alike("reference")
    assert not any(alike(noise) for noise in range(5)), "nine of ten tokens are the same nevertheless"


def test_without_alternatives_a_margin_is_unknown() -> None:
    request = AuditRequest(0, 0, "chat", {"temperature": 0.0}, 8, seed=1)

    def answer(token: str, *top: tuple[str, float]) -> AuditAnswer:
        return AuditAnswer(text=token, tops=[TokenTop(token, -0.25, top)])

    bare = reported_margin(request, answer("a"), answer("b"), 0, None)
    assert bare is None
    told = reported_margin(request, answer("a"), answer("b", ("b", -0.25), ("a", -1.0)), 0, None)
    assert told == pytest.approx(0.75)


def test_near_ties_of_draws_are_not_counted_beside_the_gaps_of_greedy_answers() -> None:
    greedy, drawn_ = (
        AuditRequest(0, 0, "chat", {"temperature": temperature}, 8, seed=1) for temperature in (0.0, 0.8)
    )
    assert counted_margin(greedy, 0.01, 0.02) == counted_margin(drawn_, 0.01, 0.005) == 0.01
    assert counted_margin(drawn_, 0.01, 0.02) is counted_margin(greedy, None, 0.02) is None


@pytest.mark.parametrize(("temperature", "is_told"), [(0.0, True), (0.8, False)])
def test_at_the_edge_of_a_filter_a_draw_has_no_margin(temperature: float, is_told: bool) -> None:
    request = AuditRequest(0, 0, "chat", {"temperature": temperature, "top_p": 0.9}, 8, seed=1)
    answer = AuditAnswer(token_ids=[5], tops=[TokenTop("a", -0.25, (("a", -0.25), ("b", -1.0)))])
    assert (reported_margin(request, answer, answer, 0, 3) is not None) == is_told
    unfiltered = replace(request, params={"temperature": temperature})
    assert reported_margin(unfiltered, answer, answer, 0, 3) is not None
