"""An engine with a verifier of somebody else's, found by its place."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.proposal import ROOT, ProposalKind, Verdict
from slipstream.errors import ConfigError
from slipstream.sampling.noise import Stream
from slipstream.verify.base import Judgement, Verifier
from tests.kit.engines import MakeLLM


class PatientVerifier(Verifier):
    """Draws the target's token at the root and accepts one draft token at most."""

    name = "patient"
    kinds = frozenset({ProposalKind.ONE_HOT})

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [self._verdict(judgement) for judgement in judgements]

    def _verdict(self, judgement: Judgement) -> Verdict:
        proposal, noise = judgement.proposal, judgement.noise
        token = noise.draw(judgement.log_probs[0], noise.root_position, Stream.NEXT_TOKEN)
        for child in proposal.children.get(ROOT, []):
            if proposal.token_ids[child] == token:
                after = noise.draw(judgement.log_probs[child + 1], noise.root_position + 1, Stream.NEXT_TOKEN)
                return Verdict((child,), after)
        return Verdict((), token)


OWN = {"method": "draft_model", "model": EMBEDDED_DRAFT, "verifier": f"{__name__}:PatientVerifier"}


def test_an_engine_goes_by_what_the_verifier_can_do(make_llm: MakeLLM) -> None:
    llm, plain = make_llm(OWN), make_llm()
    prompt = [5, 6, 7, 8]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    own = llm.generate(prompt, greedy)[0].outputs[0]
    assert own.token_ids == plain.generate(prompt, greedy)[0].outputs[0].token_ids
    assert own.reproducible
    assert len(own.metrics.acceptance_histogram) == 2, "it accepts one draft token at most"
    assert own.metrics.num_accepted_tokens > 0
    assert llm.engine.drafter.traits.kinds == {ProposalKind.ONE_HOT}, "the draft suits the verifier"
    sampled = llm.generate(prompt, SamplingParams(temperature=0.8, max_tokens=24, seed=3))[0].outputs[0]
    assert not sampled.reproducible
    assert llm.engine.drafting.num_failures == 0


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("couple", "unknown verifier 'couple'; did you mean 'coupled'?"),
        ("no_such_module:Mine", "verifier 'no_such_module:Mine' cannot be loaded"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_loaded(verifier: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("no/such/checkpoint", speculative_config={"method": "ngram", "verifier": verifier})
    assert message in str(caught.value)
