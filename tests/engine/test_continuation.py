"""An answer that goes on elsewhere, from its emitted tokens, is the one that it would have been in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.request import EmittedTokens
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.errors import RequestError
from tests.kit.engines import MakeLLM

CHAIN = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
TREE = {"method": "slipstream.testing.stub_drafters:RandomTreeDrafter", "num_draft_nodes": 6}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
}
SCHEMA |= {"required": ["name", "old"], "additionalProperties": False}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.6,
    },
    "stop": {"temperature": 0.8, "stop": ["er", "the c"], "min_tokens": 12, "max_tokens": 60},
    "kept stop": {"temperature": 0.7, "stop": [" a"], "include_stop_str_in_output": True, "max_tokens": 60},
    "schema": {"temperature": 0.9, "structured": {"json_schema": SCHEMA}, "max_tokens": 60},
    "regex": {"temperature": 1.0, "structured": {"regex": "[a-z]{6} [0-9]{4}"}, "max_tokens": 40},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 16},
    "three": {
        "temperature": 1.0,
        "n": 3,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "stop": ["e"],
        "max_tokens": 30,
    },
    "masks": {
        "temperature": 1.2,
        "bad_words": ["the", " of a"],
        "min_tokens": 8,
        "ignore_eos": True,
        "max_tokens": 20,
    },
    "context": {"temperature": 0.9, "ignore_eos": True, "max_tokens": None, "n": 1},
}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    """Engines of the same target that differ in all that may not matter."""
    room = {"kv_cache_bytes": 64 * 2**20, "max_model_len": 192}
    plain = LLM(**room)
    return {
        "off": plain,
        "chain": LLM(speculative_config=CHAIN, **room),
        "tree": LLM(speculative_config=TREE, max_num_batched_tokens=24, **room),
    }


def run(llm: LLM, prompt: Seq[int], params: SamplingParams, emitted: Seq[EmittedTokens] = ()) -> list[Update]:
    llm.engine.add_request("r", prompt, params, emitted=emitted)
    updates: list[Update] = []
    while llm.engine.has_unfinished:
        updates += llm.engine.step()
    assert llm.engine.integrity() == []
    return updates


def output_of(updates: Seq[Update]) -> RequestOutput:
    assert updates[-1].output is not None
    return updates[-1].output


def emitted_by(updates: Seq[Update], params: SamplingParams) -> list[EmittedTokens]:
    """What a caller has who was given these updates."""
    return [
        EmittedTokens(
            [token for update in updates if update.index == index for token in update.token_ids],
            logprobs=[
                entry for update in updates if update.index == index for entry in update.logprobs or ()
            ],
        )
        for index in range(params.n)
    ]


def said(updates: Seq[Update], index: int) -> str:
    return "".join(update.text for update in updates if update.index == index)


def check_same(lone: RequestOutput, before: Seq[Update], after: Seq[Update]) -> None:
    """Whole output, streamed tokens and streamed text are the lone run's."""
    output = output_of(after)
    assert output.prompt_token_logprobs == lone.prompt_token_logprobs
    for answer, wanted in zip(output.outputs, lone.outputs, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed", "token_logprobs"):
            assert getattr(answer, name) == getattr(wanted, name), name
        assert answer.metrics.num_output_tokens == wanted.metrics.num_output_tokens
        assert answer.metrics.num_prompt_tokens == wanted.metrics.num_prompt_tokens
        streamed = [*before, *after]
        assert said(streamed, answer.index) == wanted.text
        tokens = [token for update in streamed if update.index == answer.index for token in update.token_ids]
        assert tokens == wanted.token_ids


@pytest.mark.parametrize("name", REQUESTS)
def test_it_goes_on_anywhere_as_it_would_have(
    engines: dict[str, LLM], prompts: list[list[int]], name: str
) -> None:
    """Cut behind every few updates, continued by an engine that drafts otherwise, and cut once more there."""
    params = SamplingParams(seed=11, **({"max_tokens": 24} | REQUESTS[name]))
    for number, (first, second) in enumerate([("off", "chain"), ("chain", "tree"), ("tree", "off")]):
        prompt = prompts[4 * number + 1]
        updates = run(engines[first], prompt, params)
        lone = output_of(updates)
        for cut in range(1, len(updates), max(1, len(updates) // 3)):
            before = updates[:cut]
            after = run(engines[second], prompt, params, emitted_by(before, params))
            check_same(lone, before, after)
            again = [*before, *after[: len(after) // 2]]
            if len(again) > cut:
                rest = run(engines[first], prompt, params, emitted_by(again, params))
                check_same(lone, again, rest)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_where_a_seed_repeats_an_answer_every_verifier_continues_it(
    make_llm: MakeLLM, prompts: list[list[int]], verifier: str
) -> None:
    llm = make_llm({**CHAIN, "verifier": verifier})
    for values in ({"temperature": 0.0}, {"temperature": 0.9, "max_draft_tokens": 0}):
        options = {"max_draft_tokens": values.pop("max_draft_tokens", None)}
        params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, **values)
        lone = llm.generate(prompts[8], params, **options)[0]
        for cut in (1, 7, 19):
            emitted = [EmittedTokens(lone.outputs[0].token_ids[:cut])]
            whole = asyncio.run(continued(llm, prompts[8], params, emitted, options))
            assert whole.outputs[0].token_ids == lone.outputs[0].token_ids


async def continued(
    llm: LLM, prompt: Seq[int], params: SamplingParams, emitted: Seq[EmittedTokens], options: Any
) -> RequestOutput:
    async with AsyncEngine(engine=llm.engine) as engine:
        async for update in engine.stream(prompt, params, emitted=emitted, **options):
            if update.output is not None:
                return update.output
    raise AssertionError("a stream ends with an output")


def test_only_new_tokens_count_as_made_here(engines: dict[str, LLM], prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params.seed = 1
    llm = engines["off"]
    token_ids = output_of(run(llm, prompts[1], params)).outputs[0].token_ids
    metrics = output_of(run(llm, prompts[1], params, [EmittedTokens(token_ids[:10])])).metrics
    assert (metrics.num_output_tokens, metrics.num_resumed_tokens, metrics.num_new_tokens) == (16, 10, 6)
    assert metrics.num_steps == 6
    assert metrics.acceptance_length == 1
    assert 0 < metrics.time_to_first_token_s <= metrics.total_s
    assert metrics.num_cached_tokens <= metrics.num_prompt_tokens


def test_what_cannot_be_continued_is_refused_and_leaves_nothing(
    engines: dict[str, LLM], prompts: list[list[int]]
) -> None:
    llm, prompt = engines["off"], prompts[1]
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
    whole = output_of(run(llm, prompt, params)).outputs[0].token_ids
    width = llm.engine.model.vocab_size
    for emitted, changed, words in [
        ([EmittedTokens(whole)], {}, "all answers are complete"),
        ([EmittedTokens([*whole, 5])], {}, "ends with emitted token 4, but 5"),
        ([EmittedTokens([width])], {}, f"token id {width}; this model's ids are"),
        ([EmittedTokens([1])] * 2, {}, "one entry for each of the 1 answers, got 2"),
        ([EmittedTokens([1])], {"logprobs": 1}, "must have 1 entries"),
        ([EmittedTokens([1])], {"seed": None}, "needs the seed"),
    ]:
        own = params.clone()
        for key, value in changed.items():
            setattr(own, key, value)
        with pytest.raises(RequestError, match=words):
            llm.engine.add_request("r", prompt, own, emitted=emitted)
        assert not llm.engine.has_unfinished
    with pytest.raises(RequestError, match="from_draft has 1 entries for 2 tokens"):
        EmittedTokens([1, 2], [True])
    assert llm.engine.integrity() == []


def test_an_answer_that_is_complete_still_counts_what_was_expected(
    engines: dict[str, LLM], prompts: list[list[int]]
) -> None:
    """One answer ends before the cut, the other one goes on: both say how much of the prediction they have."""
    params = SamplingParams(seed=3, n=2, temperature=1.0, max_tokens=40, stop=["e"], min_tokens=4)
    for prompt in (one for one in prompts if len(one) < 100):
        [lone] = engines["off"].generate([prompt], params)
        short, long = sorted(lone.outputs, key=lambda one: len(one.token_ids))
        if len(short.token_ids) < len(long.token_ids):
            break
    options = RequestOptions(prediction=short.token_ids)
    [lone] = engines["off"].generate([prompt], params, options=options)
    emitted = [EmittedTokens(one.token_ids[: len(short.token_ids)]) for one in lone.outputs]
    engine = engines["off"].engine
    engine.add_request("r", prompt, params, options, emitted=emitted)
    while engine.has_unfinished:
        *_, last = engine.step()
    assert last.output is not None
    for mine, theirs in zip(last.output.outputs, lone.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        for name in ("num_accepted_prediction_tokens", "num_rejected_prediction_tokens"):
            assert getattr(mine.metrics, name) == getattr(theirs.metrics, name)
    assert last.output.outputs[short.index].metrics.num_accepted_prediction_tokens == len(short.token_ids)
