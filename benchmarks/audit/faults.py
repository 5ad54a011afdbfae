"""The named faults: what each does to an engine, or to a server in front of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.audit import faulty
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.sampling.params import SamplingParams

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
LOOKUP: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2}
"""For faults that have nothing to do with drafts: it costs next to nothing."""
PLACE = "benchmarks.audit.faulty"
BLOCK = 16
"""Tokens of the stale block of a prefix cache."""
STALE_SHARE = 1 / 20
CUT_SHARE = 3 / 1000


@dataclass(slots=True)
class Answered:
    """One answer as a server tells it."""

    prompt: int
    params: SamplingParams
    token_ids: list[int]
    finish_reason: str
    num_output_tokens: int
    """As its usage says."""


Asked = tuple[Seq[int], SamplingParams]
"""Token ids of a prompt, and how it is to be answered."""


def _as_asked(asked: Asked, _chance: random.Random) -> Asked:
    return asked


def _as_it_is(answered: Answered, _chance: random.Random) -> Answered:
    return answered


@dataclass(frozen=True)
class Fault:
    """A way to be wrong."""

    name: str
    speculation: dict[str, Any] | None
    """Speculation of the faulty engine; None is off."""
    engine: dict[str, Any]
    """Its other options."""
    before: Callable[[Asked, random.Random], Asked] = _as_asked
    """What happens to a request."""
    after: Callable[[Answered, random.Random], Answered] = _as_it_is
    """What happens to an answer."""
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    seeds: bool = True
    """False where the engine would not keep to a seed without the fault either."""
    usage: bool = False
    """True where only the usage is wrong."""


def _with(**changes: Any) -> Callable[[Asked, random.Random], Asked]:
    """Serve every sampled request with other parameters than it has."""

    def change(asked: Asked, _chance: random.Random) -> Asked:
        prompt, params = asked
        return prompt, params if params.greedy else replace(params, **changes)

    return change


def _with_temperature(told: float, served: float) -> Callable[[Asked, random.Random], Asked]:
    """Serve requests of temperature `told` at `served`."""

    def change(asked: Asked, _chance: random.Random) -> Asked:
        prompt, params = asked
        return prompt, replace(params, temperature=served) if params.temperature == told else params

    return change


def _stale(asked: Asked, chance: random.Random) -> Asked:
    """Entries of another prompt in the first block: the same as an answer to a prompt that begins otherwise."""
    prompt, params = asked
    if chance.random() >= STALE_SHARE or len(prompt) <= BLOCK:
        return asked
    return [*chance.sample(range(4, 1000), BLOCK), *prompt[BLOCK:]], params


def _cut(answered: Answered, chance: random.Random) -> Answered:
    if chance.random() >= CUT_SHARE or len(answered.token_ids) < 2:
        return answered
    kept = chance.randrange(1, len(answered.token_ids))
    return replace(
        answered, token_ids=answered.token_ids[:kept], finish_reason="stop", num_output_tokens=kept
    )


def _twice(answered: Answered, _chance: random.Random) -> Answered:
    return replace(answered, num_output_tokens=2 * answered.num_output_tokens)


HONEST_SEEDED = Fault("honest, coupled", DRAFT, {})
HONEST_CLASSICAL = Fault("honest, rejection", {**DRAFT, "verifier": "rejection"}, {}, seeds=False)
HONEST = (HONEST_SEEDED, HONEST_CLASSICAL)

GREEDY_CALLED_SAMPLED = "greedy drafts verified as if sampled"
FAULTS = (
    Fault(
        GREEDY_CALLED_SAMPLED,
        {**DRAFT, "method": f"{PLACE}:GreedyCalledSampled", "verifier": "rejection"},
        {},
        seeds=False,
    ),
    Fault(
        "residual not renormalised", {**DRAFT, "verifier": f"{PLACE}:UnnormalisedResidual"}, {}, seeds=False
    ),
    Fault("bonus row unprocessed", DRAFT, {}, during=faulty.unprocessed_bonus_rows),
    Fault("temperature 0.8 served as 0.85", LOOKUP, {}, before=_with_temperature(0.8, 0.85)),
    Fault("temperature 0.8 served as 0.95", LOOKUP, {}, before=_with_temperature(0.8, 0.95)),
    Fault("top_p ignored", LOOKUP, {}, before=_with(top_p=1.0)),
    Fault("float32 served as int8", LOOKUP, {"quantization": "int8"}),
    Fault("a tie broken otherwise", {**LOOKUP, "verifier": f"{PLACE}:OtherTies"}, {}),
    Fault("a stale prefix cache in 1 of 20 answers", LOOKUP, {}, before=_stale),
    Fault("usage counted twice", LOOKUP, {}, after=_twice, usage=True),
    Fault("3 in 1,000 answers cut", LOOKUP, {}, after=_cut),
)
