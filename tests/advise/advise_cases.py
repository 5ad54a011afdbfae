"""Costs made by hand, whose consequences can be worked out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from slipstream.config import SpeculativeConfig
from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.costs import DrafterCost, StepCosts
from slipstream.tools.advise.recording import NOT_DRAFTED, Drafted, Recorded, RecordedRequest
from slipstream.tools.advise.scores import RecordedScores
from slipstream.tools.advise.simulate import SimulatedCache, Simulator

FREE = StepCosts({1: ((0.0, 1.0), (64.0, 1.0))}, {1: 0.0}, 0.0, 0.0, ((1.0, 0.0),), {})
"""Every step takes a second, whatever it does."""


def linear(
    step_s: float,
    request_s: float,
    checked_s: float,
    level_s: Mapping[str, float],
    batches: tuple[int, ...] = (1, 4, 16),
) -> StepCosts:
    """A step takes so much, each request and each checked token so much more, and a drafter so much a level."""
    steps = {
        number: tuple(
            (float(k * number), step_s + request_s * number + checked_s * k * number) for k in (0, 8)
        )
        for number in batches
    }
    drafters = {
        name: DrafterCost(dict.fromkeys(batches, ((1.0, each), (8.0, 8 * each))))
        for name, each in level_s.items()
    }
    return StepCosts(steps, dict.fromkeys(batches, 0.0), 0.0, 0.0, ((1.0, 0.0),), drafters)


def request(
    num_output: int, drafts: list[Drafted] | None = None, task: str = "a", num_prompt: int = 1
) -> RecordedRequest:
    """A request whose drafter, if there is one, is called `draft`."""
    given = {} if drafts is None else {"draft": drafts}
    return RecordedRequest(task, [1] * num_prompt, 0, list(range(num_output)), num_output, 0, given)


def chain(depth: int, right: list[int]) -> list[Drafted]:
    """Chains of `depth` tokens, fewer before the end of the answer, of which so many are right at each place."""
    lengths = [min(depth, len(right) - place - 1) for place in range(len(right))]
    return [(length, length, min(length, each)) for length, each in zip(lengths, right, strict=True)]


CANDIDATE = Candidate(
    "draft",
    SpeculativeConfig("draft_model", options={"model": "m", "num_speculative_tokens": 4}),
    (1, 2, 4),
)


def recorded(requests: Sequence[RecordedRequest]) -> Recorded:
    """A recording of them, one at a time."""
    return Recorded(tuple(requests), len(requests), 1)


def hand_made(
    requests: Sequence[RecordedRequest],
    costs: StepCosts,
    max_rows: int = 512,
    max_requests: int = 32,
    reuses_prefixes: bool = True,
    fast_prompts: bool = False,
) -> Simulator:
    """A simulator of the one candidate `draft`, which drafts nothing where the requests have no drafts."""
    filled = [
        replace(one, drafts=one.drafts or {"draft": [NOT_DRAFTED] * one.num_output}) for one in requests
    ]
    scores = [RecordedScores(CANDIDATE, recorded(filled))]
    new_cache = partial(SimulatedCache, reuses_prefixes, fast_prompts)
    return Simulator(filled, [CANDIDATE], scores, costs, max_rows, max_requests, new_cache)
