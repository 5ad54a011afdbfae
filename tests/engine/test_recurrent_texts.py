"""Models with recurrent layers in whole engines: text is a lone run's, whatever is drafted, reused or preempted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.request import RequestOptions
from slipstream.errors import CapacityError, ConfigError
from slipstream.kv.checkpoints import StateAccounting
from slipstream.kv.state import input_bytes, state_bytes
from slipstream.models.mixers.gated_delta import GatedDelta
from slipstream.plan.planner import Planner
from slipstream.plan.process import USUAL
from tests.kit.recurrent_models import recurrent_model

KINDS = ["qwen3.5", "mamba2", "lfm2", "falcon-h1", "zamba"]
"""A matrix and a window beside attention; no attention at all; a window alone; both in one layer; several matrices in
one layer, and shared attention."""
WITH_PYTORCHS_PRODUCTS = ["mamba2", "zamba"]
"""The code of one reads the weight of its output layer, which so is not packed; the other multiplies with a matrix for
each head, and its attention is PyTorch's. All else has the same bits in any pass."""
NUM_TOKENS = 16


def engine(family: str, spec: dict[str, Any] | None = None, **options: Any) -> LLM:
    options = {"kv_cache_bytes": 8 * 2**20, "num_threads": 1, "max_num_seqs": 8, **options}
    return LLM(recurrent_model(family), speculative_config=spec, **options)


def tight_engine(family: str, num_tokens: int, **options: Any) -> LLM:
    """One whose cache has room for the states of all sequences and for so many tokens, of which copies of states take
    a quarter at most."""
    ample = engine(family, **options).engine
    plan = ample.memory_plan
    needed = plan.state_bytes - plan.num_state_copies * state_bytes(ample.model.states)
    room = needed + num_tokens * plan.kv_bytes_per_token
    return engine(family, kv_cache_bytes=room, **options)


def drafted(family: str, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": recurrent_model(family, 0.03), **options}


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "chunks": lambda family: {"max_num_batched_tokens": 9},
    "ngram": lambda family: {"spec": {"method": "ngram"}},
    "recycled tree": lambda family: {"spec": {"method": "token_recycling"}},
    "chain": lambda family: {"spec": drafted(family, num_speculative_tokens=4), "max_num_batched_tokens": 19},
    "tree": lambda family: {"spec": drafted(family, tree_top_k=2, num_draft_nodes=9)},
    "lookahead": lambda family: {"spec": {"method": "lookahead"}},
}


def prompts() -> list[list[int]]:
    """Some begin alike, and one is repetitive."""
    generator = random.Random(3)
    shared = [generator.randrange(3, 300) for _ in range(37)]
    tails = [[generator.randrange(3, 300) for _ in range(length)] for length in (1, 9, 21)]
    return [*(shared + tail for tail in tails), shared[:5] * 7, tails[2]]


Answer = tuple[list[int], list[float], int, int, int]
"""Tokens and their log-probabilities; how many tokens of the prompt were reused, drafted and accepted."""


def answers(llm: LLM, texts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    """Half of them are sampled."""
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        for i in range(len(texts))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(text)} for text in texts], params, **options)
    return [
        (
            list(output.outputs[0].token_ids),
            [each.logprob for each in output.outputs[0].token_logprobs],
            output.metrics.num_cached_tokens,
            output.metrics.num_draft_tokens,
            output.metrics.num_accepted_tokens,
        )
        for output in outputs
    ]


def lone(llm: LLM, texts: Sequence[Sequence[int]]) -> list[list[Answer]]:
    """Two turns, each request by itself."""
    turns = [answers(llm, texts), []]
    turns[1] = answers(llm, second_turn(texts, turns[0]))
    return turns


def second_turn(texts: Sequence[Sequence[int]], first: Sequence[Answer]) -> list[list[int]]:
    return [[*text, *answer[0], 7, 8, 9] for text, answer in zip(texts, first, strict=True)]


@cache
def expected(family: str) -> list[list[Answer]]:
    return lone(engine(family, max_num_seqs=1, enable_prefix_caching=False), prompts())


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("qwen3.5", way) for way in WAYS),
        *(("mamba2", way) for way in ("chunks", "chain")),
        *(("lfm2", way) for way in ("ngram", "tree")),
        *(("falcon-h1", way) for way in ("chain", "recycled tree")),
        *(("zamba", way) for way in ("chunks", "tree", "lookahead")),
    ],
)
def test_text_and_log_probabilities_are_a_lone_runs(family: str, way: str) -> None:
    wanted = expected(family)
    llm = engine(family, **WAYS[way](family))
    texts = prompts()
    first = answers(llm, texts)
    again = answers(llm, texts)
    second = answers(llm, second_turn(texts, first))
    for name, ours, theirs in (
        ("first", first, wanted[0]),
        ("again", again, wanted[0]),
        ("second", second, wanted[1]),
    ):
        assert [answer[0] for answer in ours] == [answer[0] for answer in theirs], name
        tolerance = 2e-4 if family in WITH_PYTORCHS_PRODUCTS else 0.0
        for mine, lone_one in zip(ours, theirs, strict=True):
            assert mine[1] == pytest.approx(lone_one[1], rel=0.0, abs=tolerance), name
    # Which of the texts with the same blocks of 16 tokens is gone on with is left to the accounting.
    missing = [len(text) - answer[2] for answer, text in zip(again, texts, strict=True)]
    assert max(missing) <= 16
    assert missing.count(1) >= 3
    reused = [answer[2] - len(text) for answer, text in zip(second, texts, strict=True)]
    assert min(reused) >= 10, "the second turn goes on behind most of the first answer"
    if "spec" in WAYS[way](family):
        num_drafted, num_accepted = (
            sum(answer[place] for answer in (*first, *again, *second)) for place in (3, 4)
        )
        assert num_accepted < num_drafted, "some drafts are rejected"
        assert num_accepted or way not in ("chain", "tree"), (
            "some drafts of nearly the same model are accepted"
        )
    assert llm.engine.integrity() == []


@pytest.mark.parametrize("family", KINDS)
def test_a_wrong_prediction_changes_nothing(family: str) -> None:
    wanted = expected(family)
    llm = engine(family, {"method": "ngram"})
    guesses = [[token if i % 5 else token - 1 for i, token in enumerate(answer[0])] for answer in wanted[0]]
    options = [RequestOptions(prediction=guess) for guess in guesses]
    assert [answer[0] for answer in answers(llm, prompts(), options=options)] == [
        each[0] for each in wanted[0]
    ]


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "falcon-h1"])
def test_preempted_sequences_go_on(family: str) -> None:
    texts = 2 * prompts()
    wanted = answers(engine(family, max_num_seqs=1, enable_prefix_caching=False), texts)
    tight = tight_engine(family, 210, max_model_len=90, spec=drafted(family, num_speculative_tokens=3))
    assert [answer[0] for answer in answers(tight, texts)] == [answer[0] for answer in wanted]
    assert tight.engine.stats().num_preemptions > 0
    assert tight.engine.integrity() == []


@pytest.mark.parametrize(
    ("fails_in", "spec"),
    [
        ((1,), None),
        ((2, 4), {"method": "token_recycling"}),
        ((5,), {"method": "token_recycling"}),
        ((7, 8), None),
    ],
)
def test_a_failed_pass_is_made_again(
    fails_in: tuple[int, ...], spec: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when one recurrence has changed its states and others have not."""
    plain = engine("qwen3.5", max_num_seqs=1, enable_prefix_caching=False)
    wanted = answers(plain, prompts())
    llm = engine("qwen3.5", spec, max_num_batched_tokens=30)
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts()))
    ]
    compute, calls, failing = GatedDelta.compute, 0, False

    def faulty(self: GatedDelta, *given: Any, **others: Any) -> Any:
        nonlocal calls
        calls += 1
        if failing and calls == 2:
            raise MemoryError("no room")
        return compute(self, *given, **others)

    monkeypatch.setattr(GatedDelta, "compute", faulty)
    told: dict[str, list[int]] = {}
    for name, prompt in enumerate(prompts()):
        llm.engine.add_request(f"{name}", prompt, params[name])
        told[f"{name}"] = []
    step = 0
    while llm.engine.has_unfinished:
        step, calls, failing = step + 1, 0, step + 1 in fails_in
        if failing:
            with pytest.raises(MemoryError, match="no room"):
                llm.engine.step()
            continue
        for update in llm.engine.step():
            told[update.request_id] += update.token_ids
    assert list(told.values()) == [answer[0] for answer in wanted]
    assert llm.engine.integrity() == []
    assert [answer[0] for answer in answers(llm, prompts())] == [answer[0] for answer in wanted]


NUM_STEPS = 60
NUM_LONG_STEPS = int(os.environ.get("SLIPSTREAM_HISTORY_STEPS", "300"))


def history(llm: LLM, plain: LLM, seed: int, num_steps: int) -> int:
    """Conversations that branch, end and are aborted at random; every answer is compared; returns the steps."""
    rng = random.Random(seed)
    texts: list[list[int]] = prompts()
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    told: dict[str, list[int]] = {}
    done, steps = 0, 0
    while steps < num_steps or llm.engine.has_unfinished:
        if steps < num_steps and rng.random() < 0.3 and len(asked) < 8:
            prompt = rng.choice(texts)
            prompt = prompt[: rng.choice([len(prompt), rng.randint(1, len(prompt))])]
            prompt = [*prompt, *(rng.randrange(3, 300) for _ in range(rng.randrange(4)))][-90:]
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.9]), seed=steps, max_tokens=rng.randint(1, 25), ignore_eos=True
            )
            name, tenant = f"{seed}-{steps}", rng.choice(["", "a"])
            asked[name], told[name] = (prompt, params), []
            llm.engine.add_request(name, prompt, params, RequestOptions(tenant=tenant))
        if asked and rng.random() < 0.05:
            name = rng.choice(sorted(asked))
            llm.engine.abort(name)
            del asked[name]
        steps += 1
        for update in llm.engine.step():
            if update.request_id not in asked:
                continue
            told[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                prompt, params = asked.pop(update.request_id)
                lone_answer = plain.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0]
                assert told[update.request_id] == list(lone_answer.token_ids), update.request_id
                texts = [*texts, [*prompt, *told[update.request_id]]][-8:]
                done += 1
        assert llm.engine.integrity() == []
    assert done > num_steps // 40
    return steps


ROOM = {"num_tokens": 270, "max_model_len": 120}
HISTORIES = [("qwen3.5", "recycled tree"), ("mamba2", "chain"), ("lfm2", "tree"), ("falcon-h1", "chain")]


@pytest.mark.parametrize(("family", "way"), HISTORIES)
def test_random_histories_equal_lone_runs(family: str, way: str) -> None:
    llm = engine(family, **WAYS[way](family))
    plain = engine(family, max_num_seqs=1, enable_prefix_caching=False)
    assert history(llm, plain, 1, NUM_STEPS) >= NUM_STEPS


@pytest.mark.long
@pytest.mark.parametrize(("family", "way"), HISTORIES)
def test_many_random_histories_equal_lone_runs(family: str, way: str) -> None:
    """Where the cache has too little room for all; without attention there is nothing that could lack it."""
    has_keys = family != "mamba2"
    llm = (tight_engine if has_keys else engine)(family, **(ROOM if has_keys else {}), **WAYS[way](family))
    plain = engine(family, max_num_seqs=1, enable_prefix_caching=False)
    assert sum(history(llm, plain, seed, NUM_LONG_STEPS) for seed in range(2)) >= 2 * NUM_LONG_STEPS
    assert (llm.engine.stats().num_preemptions > 0) == has_keys


@pytest.mark.parametrize(
    "spec", [{"method": "layer_skip", "exit_layer": 1}, {"method": "cascade", "draft": {"method": "ngram"}}]
)
def test_drafters_may_not_use_the_targets_own_states(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="recurrent layers have one state of a text"):
        engine("qwen3.5", spec)


def test_auto_leaves_out_what_drafts_in_the_targets_states() -> None:
    llm = engine("qwen3.5", {"method": "auto"})
    assert llm.engine.draft_methods == ["suffix"]
    plain = engine("qwen3.5")
    assert [a[0] for a in answers(llm, prompts())] == [a[0] for a in answers(plain, prompts())]


def test_too_little_memory_for_states_is_refused() -> None:
    with pytest.raises(CapacityError, match="lower max_num_seqs or raise kv_cache_bytes"):
        engine("qwen3.5", kv_cache_bytes=30_000)


def test_a_plan_counts_states() -> None:
    config = EngineConfig(model=recurrent_model("qwen3.5"), num_threads=1)
    chain = SpeculativeConfig.from_mapping(drafted("qwen3.5", num_speculative_tokens=4))
    parts = {
        part.name: part.num_bytes for part in Planner(config, chain, USUAL).at(batch=3, context=100).parts
    }
    one = state_bytes(engine("qwen3.5").engine.model.states)
    logs = 3 * 6 * input_bytes(engine("qwen3.5").engine.model.states)
    assert one > 0
    assert (parts["states"], parts["draft states"]) == (9 * one + logs, 6 * one + logs)


def test_without_prefix_caching_no_copies_are_kept() -> None:
    llm = engine("qwen3.5", enable_prefix_caching=False)
    answers(llm, prompts())
    accounting = llm.engine.runner.cache.accounting
    assert isinstance(accounting, StateAccounting)
    assert accounting.checkpoints == []
    assert llm.engine.runner.cache.pool.states is not None
    assert llm.engine.runner.cache.pool.states.num_copies == 0
