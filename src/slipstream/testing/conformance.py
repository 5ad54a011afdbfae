"""The drafter conformance kit: tests that a drafter keeps the contract of `Drafter`.

    def test_my_drafter_keeps_the_contract():
        context = draft_context(vocab_size=50)
        check_drafter(lambda: MyDrafter(MyDrafter.Options(), context), vocab_size=50)

No model is needed. A random scene is simulated (see `slipstream.testing.replay_engine`), then repeated in other ways,
and the proposals are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypedDict, Unpack

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter
from slipstream.sampling.params import SamplingParams
from slipstream.testing.leftovers import remembered, size
from slipstream.testing.replay_engine import (
    Scene,
    SceneStep,
    Stage,
    improvise,
    repeat,
    require,
    same_proposal,
)
from slipstream.verify.registry import VERIFIERS


class SceneKeywords(TypedDict, total=False):
    """What a drafter is to draft for; see `check_drafter`."""

    verifier: str
    params: Seq[SamplingParams]
    tasks: Seq[str]
    predictions: Seq[Seq[int]]
    max_len: int
    num_sequences: int


_FIRST_ID = 7_000_000_000
"""Sequence ids from here on, which cannot be confused with tokens, lengths or counts."""


def check_drafter(
    make: Callable[[], Drafter],
    vocab_size: int,
    *,
    shares_across_requests: bool = False,
    depends_on_text_only: bool = False,
    seed: int = 0,
    **scene: Unpack[SceneKeywords],
) -> None:
    """Raise AssertionError, with an explanation, where the drafters from `make` break the contract.

    Every call of `make` must return an equal, unused drafter. `scene` says what it drafts for: `num_sequences` (8)
    sequences, to which `params`, `tasks` and `predictions` (expected answers, empty ones for none) are dealt out in
    turn; `max_len` (96) bounds prompt and answer together, in tokens, and `verifier` ("coupled") judges.

    With `shares_across_requests` a drafter may learn from one request for another *of the same tenant* and must forget
    it at `reset`; without, a sequence's proposals must not depend on its batch. Of a sequence that was released
    nothing may be reachable from the drafter, whatever it says of its memory. `depends_on_text_only` demands more than
    the contract does: that a drafter which meets a sequence for the first time proposes just what one proposes that has
    followed it all along.
    """
    played = _scene(vocab_size, **scene)

    def fresh() -> Stage:
        return Stage(make(), played)

    used = fresh()
    used.call("release", Sequence(-1, "never seen", 0, [0], 1, played.params[0], 0))
    steps = improvise(used, random.Random(seed), first_id=0)
    level = _memory_when_idle(used, shares_across_requests)
    others = improvise(used, random.Random(seed + 1), first_id=_FIRST_ID)
    later = _memory_when_idle(used, shares_across_requests)
    require(
        later <= level,
        f"memory grows though no sequence is left: {level} bytes, and {later} after as many more requests",
    )

    _compare(steps, repeat(fresh(), steps), "an equal drafter drafts otherwise for the same requests")
    again = improvise(used, random.Random(seed + 2), first_id=0)  # other texts, under ids used before
    _compare(
        again, repeat(fresh(), again), "a drafter that released everything drafts differently from a new one"
    )
    _check_forgotten(used, others)
    _check_alone(fresh, steps, shares_across_requests)
    if depends_on_text_only:
        first_met = repeat(fresh(), steps, cold=fresh())
        _compare(steps, first_met, "proposals depend on more than the committed text")


def _scene(
    vocab_size: int,
    *,
    verifier: str = "coupled",
    params: Seq[SamplingParams] = (),
    tasks: Seq[str] = ("",),
    predictions: Seq[Seq[int]] = (),
    max_len: int = 96,
    num_sequences: int = 8,
) -> Scene:
    dealt = tuple(params) or (SamplingParams(),)
    traits = VERIFIERS.load(verifier).traits()
    expected = tuple(map(tuple, predictions))
    return Scene(vocab_size, max_len, num_sequences, traits, dealt, tuple(tasks), expected)


def _check_alone(fresh: Callable[[], Stage], steps: list[SceneStep], shares_across_requests: bool) -> None:
    """Require that a tenant's requests, or each request, are drafted for as they are without the others."""
    arrivals = {i: arrival for step in steps for i, arrival in step.arrivals.items()}
    if shares_across_requests:
        for tenant in {arrival.tenant for arrival in arrivals.values()}:
            own = {i for i, arrival in arrivals.items() if arrival.tenant == tenant}
            alone = [step.only(own) for step in steps]
            _compare(alone, repeat(fresh(), alone), "proposals depend on other tenants' requests")
    else:
        for i in arrivals:
            alone = [step.only({i}) for step in steps]
            _compare(alone, repeat(fresh(), alone), "proposals depend on the other sequences of the batch")


def _check_forgotten(stage: Stage, steps: list[SceneStep]) -> None:
    """Require that nothing of the released sequences of `steps` remains, and that repeating them adds no memory."""
    drafter, apart = stage.drafter, stage.belongings()
    released = {i for step in steps for i in step.arrivals}
    found = remembered(drafter, released, apart)
    require(not found, f"a released sequence is not forgotten: the drafter still holds {found}")
    sizes: list[int] = []
    for _ in range(2):
        stage.call("reset")
        repeat(stage, steps)
        stage.call("reset")
        sizes.append(size(drafter, apart))
    require(
        sizes[1] <= sizes[0],
        f"the drafter keeps more and more: {sizes[0]} entries and bytes once all sequences were released, and "
        f"{sizes[1]} after the same requests again",
    )


def _memory_when_idle(stage: Stage, shares_across_requests: bool) -> int:
    if shares_across_requests:
        stage.call("reset")
    return stage.memory_bytes()


def _compare(steps: list[SceneStep], repeated: list[dict[int, Proposal]], complaint: str) -> None:
    for number, (step, proposals) in enumerate(zip(steps, repeated, strict=True)):
        for i, proposal in proposals.items():
            first = step.proposals[i]
            require(
                same_proposal(first, proposal),
                f"{complaint} (sequence {i}, step {number}: {first.token_ids}, then {proposal.token_ids})",
            )
