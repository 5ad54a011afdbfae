"""Requests with a prediction: the same text as without one, in fewer passes, and nobody else's business."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from slipstream import LLM, AsyncEngine, RequestOptions, SamplingParams
from slipstream.core.step import StepItem
from slipstream.errors import RequestError
from slipstream.testing.enumeration import total_variation
from tests.kit.engine_enumeration import engine_distribution
from tests.kit.engines import MakeLLM

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=48, ignore_eos=True)
PROMPT = "Once upon a time"


def edited(text: str) -> str:
    """A text with a word left out, one put in and one replaced."""
    words = re.findall(r"\s*\S+", text)
    return "".join([*words[:6], *words[7:12], " lo and behold", *words[12:18], " else", *words[19:]])


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "spec", [None, {"method": "ngram"}, {"method": "auto", "drafters": [{"method": "suffix"}]}], ids=str
)
def test_the_text_is_the_same_and_comes_in_fewer_passes(
    plain: LLM, make_llm: MakeLLM, params: SamplingParams, spec: dict[str, Any] | None
) -> None:
    [off] = plain.generate(PROMPT, params)
    llm = make_llm(spec)
    wrong = "zebra quark violin " * 20
    for prediction in (off.outputs[0].text, edited(off.outputs[0].text), wrong, off.outputs[0].token_ids):
        [on] = llm.generate(PROMPT, params, prediction=prediction)
        assert on.outputs[0].token_ids == off.outputs[0].token_ids
        if prediction != wrong:
            assert on.metrics.num_steps < 0.7 * off.metrics.num_steps
            assert on.metrics.num_accepted_prediction_tokens > 24


def test_batches_samples_and_stop_strings(plain: LLM, make_llm: MakeLLM) -> None:
    """Each request has its own; one waits for nobody, and `n` answers share theirs."""
    several = SamplingParams(n=3, temperature=0.8, seed=2, max_tokens=24, stop=["e"], ignore_eos=True)
    prompts = [PROMPT, "def add(a, b):", PROMPT]
    off = plain.generate(prompts, [several, GREEDY, SEEDED])
    texts = [off[0].outputs[1].text, {"type": "content", "content": off[1].outputs[0].text}, None]
    on = make_llm(max_num_seqs=4).generate(prompts, [several, GREEDY, SEEDED], prediction=texts)
    for without, with_one in zip(off, on, strict=True):
        assert [answer.text for answer in with_one.outputs] == [answer.text for answer in without.outputs]
    counts = [output.metrics.num_accepted_prediction_tokens for output in on]
    assert counts[1] > 24
    assert counts[2] == on[2].metrics.num_rejected_prediction_tokens == on[2].metrics.num_draft_tokens == 0


@pytest.mark.long
def test_preempted_answers_are_aligned_again(plain: LLM, make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=90, ignore_eos=True)
    chosen = sorted(prompts, key=len)[:8]
    off = plain.generate(chosen, params)
    room = 500 * plain.engine.model.kv_bytes_per_token
    llm = make_llm(kv_cache_bytes=room, max_model_len=400)
    on = llm.generate(chosen, params, prediction=[edited(output.outputs[0].text) for output in off])
    assert llm.engine.stats().num_preemptions > 0
    assert [o.outputs[0].token_ids for o in on] == [o.outputs[0].token_ids for o in off]
    assert sum(o.metrics.num_steps for o in on) < 720


def test_an_answer_under_a_grammar(plain: LLM, make_llm: MakeLLM) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema["required"] = ["name", "age"]  # type: ignore[assignment]
    params = SamplingParams(
        temperature=0.8, seed=4, max_tokens=64, structured={"json_schema": schema, "compact": True}
    )
    [off] = plain.generate("A person as JSON:", params)
    for prediction in (off.outputs[0].text, '{"name":"Ada Lovelace","age":36}', "no JSON at all"):
        [on] = make_llm().generate("A person as JSON:", params, prediction=prediction)
        assert on.outputs[0].token_ids == off.outputs[0].token_ids


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_classical_verifiers_keep_the_distribution(make_llm: MakeLLM, verifier: str) -> None:
    """Enumerated; a prediction may be an answer of the same seed, so each request has random numbers of its own."""
    params = SamplingParams(temperature=1.0, top_k=2, max_tokens=4, ignore_eos=True)
    prompt = [5, 6, 7, 5, 6]
    llm = make_llm({"method": "off", "verifier": verifier})
    without = engine_distribution(llm, prompt, params)
    likely, other = max(without, key=without.get), min(without, key=without.get)  # type: ignore[arg-type]
    for prediction in (likely, (likely[0], *other[1:]), (*likely[1:], *likely)):
        options = RequestOptions(prediction=prediction)
        assert total_variation(engine_distribution(llm, prompt, params, options), without) < 1e-5
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    [answer] = llm.generate(prompt, seeded)
    assert answer.outputs[0].reproducible
    [again] = llm.generate(prompt, seeded, prediction=answer.outputs[0].token_ids)
    assert not again.outputs[0].reproducible


def test_metrics_name_it_and_bounds_hold(plain: LLM, make_llm: MakeLLM) -> None:
    [off] = plain.generate(PROMPT, GREEDY)
    text = off.outputs[0].text
    llm = make_llm({"method": "ngram"})
    seen: list[StepItem] = []
    llm.engine.on_observe = seen.extend
    llm.generate(PROMPT, GREEDY, prediction=text)
    assert "prediction" in {item.method for item in seen}
    assert all(len(item.proposal) <= 64 for item in seen)
    [bounded] = llm.generate(PROMPT, GREEDY, prediction=text, max_draft_tokens=3)
    assert len(bounded.metrics.proposed_per_position) == 3
    [none] = llm.generate(PROMPT, GREEDY, prediction=text, max_draft_tokens=0)
    assert none.metrics.num_draft_tokens == 0
    assert none.metrics.num_accepted_prediction_tokens > 40
    seen.clear()
    llm.generate(PROMPT, GREEDY)
    assert "prediction" not in {item.method for item in seen}


def test_a_prediction_of_one_tenant_drafts_for_no_other(make_llm: MakeLLM) -> None:
    """Three requests at once and one afterwards, with the same prompt: only the one that brought it is drafted for."""
    llm = make_llm({"method": "ngram"})
    [off] = llm.generate(PROMPT, GREEDY, max_draft_tokens=0)
    seen: list[StepItem] = []
    llm.engine.on_observe = seen.extend
    text = off.outputs[0].text
    options = [RequestOptions("red", prediction=text), RequestOptions("blue"), RequestOptions("red")]
    on = llm.generate([PROMPT] * 3, GREEDY, options=options)
    later = llm.generate(PROMPT, GREEDY, options=RequestOptions("blue"))
    assert {output.outputs[0].text for output in [*on, *later]} == {text}
    drafted = {item.sequence.request_id for item in seen if item.method == "prediction"}
    assert len(drafted) == 1
    assert on[0].metrics.num_accepted_prediction_tokens > 24
    assert not any(output.metrics.num_accepted_prediction_tokens for output in [*on[1:], *later])


def test_async_requests_bring_theirs_and_long_ones_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=128)

    async def ask() -> None:
        async with AsyncEngine(engine=llm.engine) as engine:
            off = await engine.generate(PROMPT, GREEDY)
            on = await engine.generate(PROMPT, GREEDY, prediction=off.outputs[0].text)
            assert on.outputs[0].token_ids == off.outputs[0].token_ids
            assert on.metrics.num_steps < off.metrics.num_steps / 3
            for text in ("word and " * 200, "word and " * 20_000):
                with pytest.raises(RequestError, match="the prediction has"):
                    await engine.generate(PROMPT, GREEDY, prediction=text)

    asyncio.run(ask())


def test_one_for_all_or_one_for_each(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="one for each of 2 prompts, got 3"):
        llm.generate([PROMPT, PROMPT], GREEDY, prediction=["a", "b", "c"])
    with pytest.raises(RequestError, match="got bool"):
        llm.generate(PROMPT, GREEDY, prediction=True)  # type: ignore[arg-type]
