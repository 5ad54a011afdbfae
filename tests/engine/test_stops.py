"""Every stop rule holds inside an accepted block: nothing after the stop is emitted, counted or cached."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams
from tests.kit.engines import ORACLE, MakeLLM

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def prompt(prompts: list[list[int]]) -> list[int]:
    return prompts[4]


@pytest.fixture(scope="module")
def future(plain: LLM, prompt: list[int]) -> list[int]:
    """What greedy decoding says after `prompt` when nothing stops it."""
    output = plain.generate(prompt, SamplingParams(**GREEDY, max_tokens=40, ignore_eos=True))[0]
    return output.outputs[0].token_ids


@pytest.fixture
def oracle(make_llm: MakeLLM, prompt: list[int], future: list[int]) -> LLM:
    """An engine whose drafter is always right, eight tokens at a time: everything happens inside blocks."""
    return make_llm({"method": ORACLE, "texts": [prompt + future], "num_speculative_tokens": 8})


def check_counters(output: RequestOutput, llm: LLM) -> None:
    """The counters agree with what was emitted, counted independently."""
    answer = output.outputs[0]
    metrics = answer.metrics
    assert metrics.num_output_tokens == len(answer.token_ids) == len(answer.from_draft)
    assert metrics.num_accepted_tokens == sum(answer.from_draft)
    assert sum(metrics.acceptance_histogram) == metrics.num_steps
    assert sum(k * n for k, n in enumerate(metrics.acceptance_histogram)) == metrics.num_accepted_tokens
    text = llm.engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert text.startswith(answer.text)
    cached = llm.engine.runner.cache.accounting
    limit = len(output.prompt_token_ids) + len(answer.token_ids)
    assert all(len(held.token_ids) <= limit for held in cached.contents())


@pytest.mark.parametrize("at", range(12))
def test_stop_token_at_every_place_of_a_block(
    oracle: LLM, prompt: list[int], future: list[int], at: int
) -> None:
    token = future[at]
    first = future.index(token)
    params = SamplingParams(**GREEDY, max_tokens=40, ignore_eos=True, stop_token_ids=[token])
    output = oracle.generate(prompt, params)[0]
    answer = output.outputs[0]
    assert answer.token_ids == future[: first + 1]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == token
    assert answer.text == oracle.engine.tokenizer.decode(future[:first], skip_special_tokens=True)
    check_counters(output, oracle)


def test_end_token_is_the_models_own_and_ends_silently(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    outputs = plain.generate(prompts, SamplingParams(**GREEDY, max_tokens=60))
    prompt, reference = next(
        (output.prompt_token_ids, output.outputs[0])
        for output in outputs
        if output.outputs[0].finish_reason == "stop"
    )
    padded = [*prompt, *reference.token_ids, *[5] * 8]
    llm = make_llm({"method": ORACLE, "texts": [padded], "num_speculative_tokens": 8})
    output = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=200))[0]
    assert output.outputs[0].token_ids == reference.token_ids
    assert output.outputs[0].stop_reason is None
    check_counters(output, llm)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_at_every_place_of_a_block(
    oracle: LLM, prompt: list[int], future: list[int], max_tokens: int
) -> None:
    params = SamplingParams(**GREEDY, max_tokens=max_tokens, ignore_eos=True)
    output = oracle.generate(prompt, params)[0]
    assert output.outputs[0].token_ids == future[:max_tokens]
    assert output.outputs[0].finish_reason == "length"
    check_counters(output, oracle)


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "length"), (6, "stop"), (7, "stop")])
def test_both_limits_in_one_block(
    make_llm: MakeLLM, prompts: list[list[int]], plain: LLM, max_tokens: int, reason: str
) -> None:
    """The stop token is the sixth: whichever limit comes first names the reason."""
    for prompt in prompts:
        future = plain.generate(prompt, SamplingParams(**GREEDY, max_tokens=8, ignore_eos=True))[0]
        tokens = future.outputs[0].token_ids
        if tokens.index(tokens[5]) == 5:
            break
    llm = make_llm({"method": ORACLE, "texts": [prompt + tokens], "num_speculative_tokens": 8})
    params = SamplingParams(**GREEDY, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[tokens[5]])
    answer = llm.generate(prompt, params)[0].outputs[0]
    assert answer.token_ids == tokens[: min(max_tokens, 6)]
    assert answer.finish_reason == reason


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("begin", range(0, 30, 5))
def test_stop_string_cuts_text_and_tokens(
    oracle: LLM, prompt: list[int], future: list[int], begin: int, include: bool
) -> None:
    text = oracle.engine.tokenizer.decode(future, skip_special_tokens=True)
    stop = text[begin : begin + 4]
    at = text.index(stop)
    streamed: list[str] = []
    params = SamplingParams(
        **GREEDY, max_tokens=40, ignore_eos=True, stop=[stop, "\0never"], include_stop_str_in_output=include
    )
    output = oracle.generate(prompt, params, on_update=lambda update: streamed.append(update.text))[0]
    answer = output.outputs[0]
    assert answer.text == text[: at + (len(stop) if include else 0)]
    assert answer.stop_reason == stop
    assert "".join(streamed) == answer.text, "nothing was shown that had to be taken back"
    covered = oracle.engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    before = oracle.engine.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True)
    assert stop in covered
    assert stop not in before, "no token after the one that completed the stop string"
    check_counters(output, oracle)


def test_min_tokens_puts_every_stop_off(oracle: LLM, prompt: list[int], future: list[int]) -> None:
    text = oracle.engine.tokenizer.decode(future[:3], skip_special_tokens=True)
    params = SamplingParams(
        **GREEDY, max_tokens=30, min_tokens=20, ignore_eos=True, stop=[text], stop_token_ids=[future[1]]
    )
    answer = oracle.generate(prompt, params)[0].outputs[0]
    assert len(answer.token_ids) >= 20
    assert future[1] not in answer.token_ids[:20]


@pytest.mark.parametrize("room", range(1, 12))
def test_context_limit_is_never_overrun(
    make_llm: MakeLLM, prompt: list[int], future: list[int], room: int
) -> None:
    config = {"method": ORACLE, "texts": [prompt + future], "num_speculative_tokens": 8}
    llm = make_llm(config, max_model_len=len(prompt) + room)
    output = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=40, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == future[:room]
    assert output.outputs[0].finish_reason == "length"
    check_counters(output, llm)
