"""Passes that choose, walk and gather themselves, recorded on a CPU: the texts and the cache are the host's."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.core.step import StepItem
from slipstream.engine.engine import Engine
from slipstream.models.cuda import verdict
from slipstream.models.executor.choices import PassVerdicts
from slipstream.testing.recorded_graph import RecordedExecutor
from slipstream.testing.wait_audit import WaitAudit
from slipstream.text.prompts import encode_chat
from slipstream.verify.coupled import walk
from tests.kit.engines import TREE, MakeLLM, sampled_texts

RECORDED: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.recorded_graph:RecordedExecutor",
    "cpu_kernels": "torch",
}
SPECS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "chain": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3},
    "tree": TREE,
    "eagle3": {
        "method": "eagle3",
        "model": EMBEDDED_EAGLE3,
    },  # keeps features of the target beside its entries
}
DRAWN = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.99},  # often more than the candidates hold
    {"temperature": 1.3, "top_k": 1030},
    {"temperature": 0.8, "repetition_penalty": 1.2},  # the host's
    {"temperature": 0.8, "bad_words": [" the"]},
    {"temperature": 0.0, "logprobs": 2},
]
PARAMS = [SamplingParams(seed=i, max_tokens=16, **drawn) for i, drawn in enumerate(DRAWN)]


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    """The ends of short chats: a CPU takes long for the passes of long ones."""
    rows = sample_prompts()[:12]
    return [encode_chat(plain.engine.tokenizer, row["messages"])[-12 - i :] for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Texts without drafts from passes that end with logits, by the cache's type.

    Other kernels differ in last bits, with which a number may be rounded to the next of 8 bits. So of that type the
    reference attends with the same ones.
    """
    backends = {"auto": "auto", "int8": RECORDED["attention_backend"]}
    return {
        cache: texts(
            LLM(
                kv_cache_bytes=64 * 2**20,
                cpu_kernels="torch",
                kv_cache_dtype=cache,
                attention_backend=backend,
                executor="eager",
            ),
            prompts,
        )
        for cache, backend in backends.items()
    }


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts[: len(PARAMS)], PARAMS)]


def passes(engine: Engine) -> tuple[int, int]:
    """How many the engine's executor, which others may share, has replayed, and how many not."""
    executor = engine.model.executor
    assert isinstance(executor, RecordedExecutor)
    return executor.num_replayed, executor.eager.total()


def watch(engine: Engine) -> Counter[str]:
    """Counts who walks, and what the engine's passes accept, which is what the host would."""
    found: Counter[str] = Counter()

    def look(items: list[StepItem]) -> None:
        for item in items:
            if item.chosen is not None and item.walked is not None:
                assert item.walked == walk(item.proposal, item.chosen)
            found["host" if item.chosen is None else "both" if item.walked is None else "pass"] += 1
            found["moved"] += item.kept_nodes != tuple(range(len(item.kept_nodes)))
            found["cut"] += len(item.kept_nodes) < len(item.verdict.accepted)

    engine.on_checked = look
    return found


@pytest.mark.parametrize(("name", "cache"), [(name, "int8" if name == "tree" else "auto") for name in SPECS])
def test_texts_of_mixed_requests_are_those_of_passes_that_end_with_logits(
    name: str, cache: str, make_llm: MakeLLM, prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    llm = make_llm(SPECS[name], kv_cache_dtype=cache, max_num_seqs=3, **RECORDED)
    found, (_, before) = watch(llm.engine), passes(llm.engine)
    assert texts(llm, prompts) == expected[cache]
    assert passes(llm.engine)[1] == before, "not recorded"
    assert min(found["host"], found["both"], found["pass"]) > 5, found
    assert bool(found["moved"]) == (name in ("tree", "eagle3"))


def test_passes_that_are_not_recorded_choose_by_the_same_arithmetic(
    make_llm: MakeLLM,
    prompts: list[list[int]],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordedExecutor, "reason_not", lambda *_: "not in this test")
    llm = make_llm(TREE, **RECORDED)
    found, (before, _) = watch(llm.engine), passes(llm.engine)
    assert texts(llm, prompts) == expected["auto"]
    assert passes(llm.engine)[0] == before
    assert min(found["both"], found["pass"], found["moved"]) > 10, found


def test_an_answer_ends_within_an_accepted_path(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """By a token that the target says often, and by its length; what was accepted behind it is forgotten."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = make_llm(cpu_kernels="torch")
    whole = [output.outputs[0].token_ids for output in plain.generate(prompts[:6], greedy)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40 - 3 * i, ignore_eos=True, stop_token_ids=[text[9 + i]])
        for i, text in enumerate(whole)
    ]
    ends = [output.outputs[0].token_ids for output in plain.generate(prompts[:6], params)]
    llm = make_llm({**TREE, "model": EMBEDDED_TARGET}, **RECORDED)
    found = watch(llm.engine)
    for _ in range(2):  # the second time over what the first has left in the cache
        assert [output.outputs[0].token_ids for output in llm.generate(prompts[:6], params)] == ends
    assert found["cut"] > 3, found


def test_texts_are_the_same_after_preemption(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    chosen = sorted(prompts, key=len)[:4]
    wanted = sampled_texts(make_llm(cpu_kernels="torch", max_num_seqs=1), chosen)
    plan = make_llm(TREE, **RECORDED).engine.memory_plan
    room = (sum(map(len, chosen)) + 120) * plan.kv_bytes_per_token  # half of what the answers come to
    tight = make_llm(TREE, kv_cache_bytes=room, max_model_len=max(map(len, chosen)) + 61, **RECORDED)
    assert sampled_texts(tight, chosen) == wanted
    assert tight.engine.stats().num_preemptions > 0


def test_a_step_with_filters_waits_for_the_device_once(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm(**RECORDED).engine
    for number, drawn in enumerate(DRAWN[:4]):
        params = SamplingParams(seed=number, max_tokens=24, ignore_eos=True, **drawn)
        engine.add_request(f"{number}", prompts[number], params)
    for _ in range(8):
        engine.step()  # later there is nothing to record
    for _ in range(3):
        with WaitAudit() as audit:
            engine.step()
        assert audit.waits.total() == 1, audit.waits
    assert engine.stats().num_running == 4


@pytest.mark.parametrize(("name", "cache"), [("tree", "int8"), ("eagle3", "auto")])
def test_the_cache_is_the_one_that_the_host_gathers(
    name: str, cache: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines in step, of which one walks and gathers on the host: requests come, end and are aborted."""
    ours, theirs = (
        LLM(
            speculative_config=SPECS[name],
            kv_cache_bytes=10 * 2**20,
            kv_cache_dtype=cache,
            max_model_len=200,
            **RECORDED,
        ).engine
        for _ in range(2)
    )
    generator, found = random.Random(3), watch(ours)
    for number in range(10):
        prompt = generator.choice(prompts)[: generator.randint(1, 23)]
        params = SamplingParams(
            seed=number, max_tokens=generator.randint(1, 16), **generator.choice(DRAWN[:6])
        )
        for engine in (ours, theirs):
            engine.add_request(f"{number}", prompt, params)
            if number % 5 == 4:
                engine.abort(f"{number - 1}")
        for _ in range(3):
            step_both(ours, theirs, monkeypatch)
    while ours.has_unfinished:
        step_both(ours, theirs, monkeypatch)
    assert found["moved"] > 5, found
    assert not theirs.has_unfinished


def step_both(ours: Engine, theirs: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step each, after which every valid entry has the same bits."""
    ours.step()
    with monkeypatch.context() as patched:
        patched.setattr(verdict, "move_entries", lambda *_: None)
        patched.setattr(PassVerdicts, "verdict", lambda *_: None)
        theirs.step()
    caches = ours.runner.cache, theirs.runner.cache
    held, other = (list(cache.accounting.contents()) for cache in caches)
    assert held == other
    slots = [slot for entries in held for slot in entries.slots]
    for mine, expected in zip(*(cache.pool.tensors for cache in caches), strict=True):
        assert torch.equal(mine[slots], expected[slots])
