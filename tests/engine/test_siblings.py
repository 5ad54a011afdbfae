"""Samples that draft for each other: the same texts as without drafts, in fewer passes, and nobody else's business."""

from __future__ import annotations

import pytest

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.core.step import StepItem
from slipstream.testing.enumeration import total_variation
from tests.kit.engine_enumeration import engine_distribution
from tests.kit.engines import MakeLLM

PROMPT = "Once upon a time"
SAMPLES = SamplingParams(n=6, temperature=0.7, seed=3, max_tokens=48, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_samples_have_the_same_texts_in_fewer_passes(
    plain: LLM, make_llm: MakeLLM, temperature: float
) -> None:
    params = SamplingParams(n=6, temperature=temperature, seed=3, max_tokens=48, ignore_eos=True)
    [off] = plain.generate(PROMPT, params)
    llm = make_llm({"method": "siblings"})
    [on] = llm.generate(PROMPT, params)
    assert [answer.token_ids for answer in on.outputs] == [answer.token_ids for answer in off.outputs]
    assert on.metrics.num_accepted_tokens > 20
    assert on.metrics.num_steps < off.metrics.num_steps
    assert llm.engine.integrity() == []


def test_a_lone_sample_is_left_alone(make_llm: MakeLLM) -> None:
    llm = make_llm({"method": "siblings"})
    seen: list[StepItem] = []
    llm.engine.on_observe = seen.extend
    llm.generate([PROMPT] * 2, SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True))
    assert not any(len(item.proposal) for item in seen)
    assert llm.engine.drafter.memory_bytes() == 0


def test_requests_of_a_tenant_share_and_those_of_another_do_not(make_llm: MakeLLM) -> None:
    """A first sample of another tenant is drafted for as if the engine were new."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def num_accepted(llm: LLM, tenant: str) -> int:
        [output] = llm.generate(PROMPT, params, options=RequestOptions(tenant))
        return output.metrics.num_accepted_tokens

    spec = {"method": "siblings", "share": "tenant"}
    fresh = num_accepted(make_llm(spec), "blue")
    llm = make_llm(spec)
    first, again = num_accepted(llm, "red"), num_accepted(llm, "red")
    assert first == fresh < again
    assert num_accepted(llm, "blue") == fresh


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_classical_verifiers_keep_the_distribution(plain: LLM, make_llm: MakeLLM, verifier: str) -> None:
    """Enumerated; the answer drafts for itself, with all that the target said before."""
    params = SamplingParams(temperature=0.9, top_k=2, max_tokens=3, ignore_eos=True)
    prompt = list(plain.engine.tokenizer("one").input_ids)
    llm = make_llm({"method": "siblings", "share": "tenant", "verifier": verifier, "min_path_prob": 0.01})
    off = engine_distribution(plain, prompt, params)
    assert total_variation(engine_distribution(llm, prompt, params), off) < 1e-5


def test_others_draft_beside_it(plain: LLM, make_llm: MakeLLM) -> None:
    [off] = plain.generate(PROMPT, SAMPLES)
    for spec in (
        {"method": "auto", "drafters": [{"method": "siblings"}, {"method": "suffix"}]},
        {"method": "ensemble", "members": [{"method": "siblings"}, {"method": "suffix"}]},
    ):
        [on] = make_llm(spec).generate(PROMPT, SAMPLES)
        assert [answer.token_ids for answer in on.outputs] == [answer.token_ids for answer in off.outputs]
