"""Answers that may not go on, and tokens that the model cannot say."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.models import load_tokenizer
from tests.kit.engines import ORACLE, MakeLLM

SPECULATION: dict[str, dict[str, Any] | None] = {
    "off": None,
    "draft": {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 2, "num_draft_nodes": 6},
    "rejection": {"method": "draft_model", "model": EMBEDDED_DRAFT, "verifier": "rejection"},
    "oracle": {"method": ORACLE, "num_speculative_tokens": 4},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", SPECULATION)
def test_where_no_token_is_left_the_answer_ends_as_an_error(
    make_llm: MakeLLM, prompts: list[list[int]], speculation: str, temperature: float
) -> None:
    """The first token may not come a second time, so there is nothing after it."""
    llm = make_llm(SPECULATION[speculation])
    word = llm.engine.tokenizer("a", add_special_tokens=False).input_ids
    assert len(word) == 1
    params = SamplingParams(
        temperature=temperature,
        max_tokens=12,
        ignore_eos=True,
        allowed_token_ids=word,
        bad_words=["aa", "a a"],
        logprobs=2,
        n=2,
    )
    other = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    stuck, free = llm.generate([prompts[0], prompts[1]], [params, other])
    for answer in stuck.outputs:
        assert answer.finish_reason == "error"
        assert set(answer.token_ids) <= set(word), "no token that may not come"
        assert len(answer.token_ids) < 12
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        assert set(answer.text) <= {"a"}
    assert len(free.outputs[0].token_ids) == 12


@pytest.mark.parametrize("speculation", ["oracle", "auto"])
def test_where_no_token_is_left_at_first_the_answer_is_empty(make_llm: MakeLLM, speculation: str) -> None:
    """Whoever counts what a step gave must not look for its last token."""
    llm = make_llm(SPECULATION.get(speculation, {"method": speculation}))
    params = SamplingParams(
        ignore_eos=True, allowed_token_ids=[97], bad_words=[llm.engine.tokenizer.decode(97)]
    )
    updates = []
    [output] = llm.generate([[5, 6]], params, on_update=updates.append)
    [answer] = output.outputs
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("error", [], "")
    assert [update.token_ids for update in updates] == [[]]


def test_with_a_stop_token_the_answer_stops(make_llm: MakeLLM) -> None:
    llm = make_llm()
    word = llm.engine.tokenizer.decode(97)
    [output] = llm.generate([[5, 6]], SamplingParams(allowed_token_ids=[97], bad_words=[word], max_tokens=5))
    assert output.outputs[0].finish_reason == "stop"


NARROW = 3000
"""Logits of a model whose tokenizer has 4,096 tokens."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("narrow")
    model = LlamaForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    model.resize_token_embeddings(NARROW)
    model.generation_config.eos_token_id = [1, NARROW + 5]
    model.save_pretrained(folder)
    for file in Path(EMBEDDED_TARGET).glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    llm = LLM(str(folder), kv_cache_bytes=16 * 2**20)
    yield llm
    assert llm.engine.integrity() == []


def text_beyond(tokenizer: Any) -> str:
    """A word that is one token, which the narrow model has no logit for."""
    for token in range(NARROW, len(tokenizer)):
        text: str = tokenizer.decode(token)
        if tokenizer(text, add_special_tokens=False).input_ids == [token]:
            return text
    raise AssertionError("no such token")


BEYOND: dict[str, dict[str, Any]] = {
    "bad_words": {"bad_words": ["BEYOND", "e", "BEYOND e", "e BEYOND"]},
    "min_tokens": {"min_tokens": 4},
    "allowed_token_ids": {"allowed_token_ids": [70, 71], "bad_words": ["BEYOND"], "min_tokens": 4},
    "schema": {"structured": {"json_schema": {"type": "array", "items": {"type": "boolean"}}}},
    "choice": {"structured": {"choice": ["yes BEYOND", "no"]}, "min_tokens": 4},
    "regex": {"structured": {"regex": "(BEYOND)+"}},
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_tokenizer_with_more_tokens_than_the_model_harms_nobody(narrow: LLM, name: str) -> None:
    beyond = text_beyond(narrow.engine.tokenizer)
    values = json.loads(json.dumps(BEYOND[name]).replace("BEYOND", beyond.strip()))

    async def main() -> None:
        async with AsyncEngine(engine=narrow.engine) as engine:
            free = asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(max_tokens=30)))
            output = await asyncio.wait_for(
                engine.generate([5, 6, 7], SamplingParams(max_tokens=20, seed=1, **values)), 20
            )
            assert max(output.outputs[0].token_ids) < NARROW
            assert output.outputs[0].finish_reason != "error"
            assert (await asyncio.wait_for(free, 120)).outputs
            assert not engine.has_stopped

    asyncio.run(main())


def test_end_tokens_that_the_model_cannot_say_are_told_once(
    narrow: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        LLM(narrow.engine.config.model, kv_cache_bytes=16 * 2**20)
    said = [record.getMessage() for record in caplog.records if "end token" in record.getMessage()]
    assert said == [
        f"the model cannot generate its end token {NARROW + 5}: it has logits for only {NARROW} tokens"
    ]
    assert load_tokenizer(narrow.engine.config.model)
