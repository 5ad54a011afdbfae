"""Memory is decided at start, and odd sizes are nothing special."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import EngineConfig
from slipstream.engine.memory import plan_memory
from slipstream.errors import CapacityError
from slipstream.plan.sizes import format_bytes
from tests.kit.engines import MakeLLM

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT}


@pytest.mark.parametrize("spec", [None, DRAFT], ids=["off", "draft"])
@pytest.mark.parametrize("kv_cache_bytes", [8 * 2**20, 50_000_001])
def test_all_keys_and_values_stay_within_the_bound(
    make_llm: MakeLLM, spec: dict[str, Any] | None, kv_cache_bytes: int
) -> None:
    engine = make_llm(spec, kv_cache_bytes=kv_cache_bytes, max_model_len=400).engine
    plan = engine.memory_plan
    held = engine.runner.cache.memory_bytes()
    if spec:
        held += engine.drafter.cache.memory_bytes()  # type: ignore[attr-defined]
    assert held == plan.kv_bytes
    assert 0.9 * kv_cache_bytes < held <= kv_cache_bytes
    assert plan.target_bytes == engine.model.weight_bytes
    assert (plan.draft_bytes > 0) == (spec is not None)


def test_no_more_is_planned_than_can_ever_be_used(plain: LLM) -> None:
    config = EngineConfig("x", max_num_seqs=2, max_model_len=100, kv_cache_bytes=2**40)
    plan = plan_memory(config, plain.engine.model, 0, 0, max_draft_tokens=4)
    assert plan.num_slots < 400
    assert plan.max_model_len == 100


@pytest.mark.parametrize("max_model_len", [None, 65, 500, 2048])
@pytest.mark.parametrize(
    "spec", [None, {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12}], ids=["off", "tree"]
)
def test_too_little_memory_says_how_much_is_needed(
    plain: LLM, spec: dict[str, Any] | None, max_model_len: int | None
) -> None:
    """The advice, taken literally, is enough for a request of the length that was asked for."""
    options: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": 3, "kv_cache_dtype": "float32"}
    with pytest.raises(CapacityError, match="kv_cache_bytes to at least") as caught:
        LLM(speculative_config=spec, kv_cache_bytes=100_000, **options)
    assert "\n" not in str(caught.value)
    advised = re.search(
        r"set (?:max_model_len to (\d+) and )?kv_cache_bytes to at least (\d+) MiB$", str(caught.value)
    )
    assert advised is not None
    kv_cache_bytes = int(advised[2]) * 2**20
    if advised[1]:
        options["max_model_len"] = int(advised[1])
    llm = LLM(speculative_config=spec, kv_cache_bytes=kv_cache_bytes, **options)
    limit = llm.engine.max_model_len
    assert limit >= min(max_model_len or 64, 2048)
    assert llm.engine.memory_plan.kv_bytes <= kv_cache_bytes
    prompt = [5 + number % 90 for number in range(limit - 12)]
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 12
    assert llm.engine.integrity() == []
    if max_model_len:  # and less is too little, as the advice says
        with pytest.raises(CapacityError):
            LLM(speculative_config=spec, kv_cache_bytes=kv_cache_bytes - 2**20, **options)


@pytest.mark.parametrize(
    "spec", [{"method": "ngram"}, DRAFT, {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12}]
)
def test_no_drafter_shortens_the_context_in_silence(make_llm: MakeLLM, spec: dict[str, Any]) -> None:
    """Else the same request would end earlier with it than without."""
    kv_cache_bytes = 4 * 2**20
    alone = make_llm(kv_cache_bytes=kv_cache_bytes).engine.max_model_len
    assert 100 < alone < 2048
    if (
        spec["method"] == "ngram"
    ):  # it keeps no entries: where there is no room for its draft tokens it goes without
        assert make_llm(spec, kv_cache_bytes=kv_cache_bytes).engine.max_model_len == alone
        return
    with pytest.raises(CapacityError, match="without the drafter") as caught:
        LLM(speculative_config=spec, kv_cache_bytes=kv_cache_bytes)
    assert "\n" not in str(caught.value)
    advised = re.search(
        r"max_model_len to (\d+) or less.*kv_cache_bytes to at least (\d+) MiB", str(caught.value)
    )
    assert advised is not None
    limit, enough = int(advised[1]), int(advised[2]) * 2**20
    assert limit < alone
    assert make_llm(spec, kv_cache_bytes=enough).engine.max_model_len == 2048
    params = SamplingParams(temperature=0, max_tokens=2048, ignore_eos=True)
    with_and_without = [
        make_llm(each, kv_cache_bytes=kv_cache_bytes, max_model_len=limit).generate([[5, 6]], params)[0]
        for each in (None, spec)
    ]
    texts = [output.outputs[0].token_ids for output in with_and_without]
    assert texts[0] == texts[1]
    assert len(texts[0]) == limit - 2


def test_a_share_of_free_memory_that_a_drafter_shortens_is_said(
    plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slipstream.engine.memory.available_bytes", lambda device: 5 * 2**20)
    plan = plan_memory(EngineConfig("x"), plain.engine.model, 0, 4000, max_draft_tokens=4)
    assert plan.max_model_len < 204 - 64
    assert f"with it; for texts that end alike set max_model_len to {plan.max_model_len}" in caplog.text


def test_bytes_are_written_as_people_read_them() -> None:
    sizes = [0, 1023, 1536, 5 * 2**20, 3 * 2**30]
    assert [format_bytes(n) for n in sizes] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"]


def test_every_batch_size_and_row_count(make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]) -> None:
    """Batches of 1 to 33 and prompts of 1 to 65 tokens, mixed, drafted as trees: each is its lone answer."""
    llm = make_llm({**DRAFT, "tree_top_k": 2, "num_draft_nodes": 5}, max_num_seqs=33)
    text = [token for prompt in prompts for token in prompt]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    lone = {
        length: plain.generate(text[length : 2 * length], params)[0].outputs[0].token_ids
        for length in range(1, 66)
    }
    length = 0
    for batch in (*range(1, 10), 15, 16, 17, 23, 31, 32, 33):
        lengths = [1 + (length + number) % 65 for number in range(batch)]
        length += batch
        outputs = llm.generate([text[n : 2 * n] for n in lengths], params)
        assert [output.outputs[0].token_ids for output in outputs] == [lone[n] for n in lengths]


def test_reuse_of_prefixes_is_the_same_with_and_without_speculation(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    cached: list[list[int]] = []
    for spec in (None, {"method": "ngram"}, DRAFT):
        llm = make_llm(spec)
        for prompt in prompts[:6]:
            llm.generate(prompt, params)
        again = [
            llm.generate([*prompt, 7, 8, 9], params)[0].metrics.num_cached_tokens for prompt in prompts[:6]
        ]
        assert again == [len(prompt) for prompt in prompts[:6]]
        cached.append(again)
    assert cached[0] == cached[1] == cached[2]


def test_parallel_engines_do_not_disturb_each_other(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """Two engines step in turn; state that is global by mistake would show."""
    first, second = make_llm(DRAFT).engine, make_llm({"method": "ngram"}).engine
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=16)
    texts: dict[str, list[int]] = {}
    for name, engine in (("a", first), ("b", second)):
        engine.add_request(name, prompts[0], params)
    while len(texts) < 2:
        for engine in (first, second):
            for update in engine.step() if engine.has_unfinished else []:
                if update.output is not None:
                    texts[update.request_id] = update.output.outputs[0].token_ids
    assert texts["a"] == texts["b"]
