"""What a caller may ask of the engine, and what comes back."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.engine.outputs import RequestOutput
from slipstream.errors import CapacityError, ConfigError, ModelError, RequestError
from tests.kit.engines import ORACLE, MakeLLM

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
TREE = {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 10}


def test_eight_prompts_come_back_in_order_with_their_metrics(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(DRAFT)
    outputs = llm.generate(prompts[:8], SamplingParams(temperature=0, max_tokens=24))
    assert [output.prompt_token_ids for output in outputs] == prompts[:8]
    for output in outputs:
        metrics = output.metrics
        assert metrics.num_prompt_tokens == len(output.prompt_token_ids)
        assert metrics.num_output_tokens == len(output.outputs[0].token_ids)
        assert metrics.num_draft_tokens >= metrics.num_accepted_tokens
        assert 1 <= metrics.acceptance_length <= 5
        parts = metrics.queue_s + metrics.draft_s + metrics.verify_s + metrics.other_s
        assert parts == pytest.approx(metrics.total_s)
        assert 0 < metrics.time_to_first_token_s <= metrics.total_s


@pytest.mark.parametrize("spec", [None, DRAFT, TREE], ids=["off", "chain", "tree"])
def test_any_answer_is_replayed_by_its_seed(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], spec: dict[str, Any] | None
) -> None:
    """n = 3 with a drawn seed, in a batch, drafted: each answer alone, undrafted, with its seed, is the same."""
    llm = make_llm(spec)
    batch = llm.generate(prompts[:3], SamplingParams(temperature=0.9, n=3, max_tokens=16))
    for output in batch:
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        assert len({answer.seed for answer in output.outputs}) == 3
        for answer in output.outputs:
            params = SamplingParams(temperature=0.9, max_tokens=16, seed=answer.seed)
            alone = plain.generate(output.prompt_token_ids, params)[0].outputs[0]
            assert alone.token_ids == answer.token_ids
            assert alone.text == answer.text


def test_answers_of_one_request_share_the_prompt(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    prompt = max(prompts, key=len)
    output = make_llm().generate(prompt, SamplingParams(n=3, max_tokens=4, seed=1))[0]
    assert [a.metrics.num_cached_tokens for a in output.outputs] == [0, len(prompt) - 1, len(prompt) - 1]


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mixture of the sampling parameters."""
    chance = rng.random
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        top_k=rng.choice([0, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.6]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias={rng.randrange(vocab_size): 4.0} if chance() < 0.3 else None,
        min_tokens=rng.choice([0, 6]),
        bad_words=["the", " a", "SELECT name"] if chance() < 0.3 else (),
        allowed_token_ids=sorted(rng.sample(range(vocab_size), 600)) if chance() < 0.2 else None,
        max_tokens=14,
        seed=rng.randrange(2**40),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        stop=[" of"] if chance() < 0.3 else (),
    )


Lone = list[tuple[SamplingParams, RequestOutput]]


@pytest.fixture(scope="module")
def lone(plain: LLM, prompts: list[list[int]]) -> Lone:
    """Parameters of twenty prompts, and the answer of each alone and without drafts."""
    rng = random.Random(5)
    params = [random_params(rng, plain.engine.model.vocab_size) for _ in range(20)]
    return [(each, plain.generate(prompt, each)[0]) for prompt, each in zip(prompts, params, strict=False)]


@pytest.mark.parametrize(
    "spec", [{"method": "ngram"}, {"method": "suffix"}, DRAFT, TREE], ids=["ngram", "suffix", "chain", "tree"]
)
def test_every_parameter_means_the_same_under_speculation(
    make_llm: MakeLLM, lone: Lone, prompts: list[list[int]], spec: dict[str, Any]
) -> None:
    drafted = make_llm(spec).generate(prompts[:20], [wanted for wanted, _ in lone])
    for (_, alone), output in zip(lone, drafted, strict=True):
        answer, reference = output.outputs[0], alone.outputs[0]
        assert answer.token_ids == reference.token_ids
        assert (answer.text, answer.finish_reason) == (reference.text, reference.finish_reason)
        for ours, theirs in (
            (answer.token_logprobs, reference.token_logprobs),
            (output.prompt_token_logprobs, alone.prompt_token_logprobs),
        ):
            assert (ours is None) == (theirs is None)
            for a, b in zip(ours or [], theirs or [], strict=True):
                if a is None or b is None:
                    assert a is b
                    continue
                assert a.token_id == b.token_id
                assert math.isclose(a.logprob, b.logprob, abs_tol=1e-3)
                assert [t for t, _ in a.top[:1]] == [t for t, _ in b.top[:1]] or len(a.top) == 0


def test_logprobs_are_those_of_the_model(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """Checked against a forward pass of plain Transformers, which rounds no keys and values."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = make_llm(kv_cache_dtype="float32")
    prompt = prompts[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = plain.generate(prompt, params)[0]
    answer = output.outputs[0]
    model = AutoModelForCausalLM.from_pretrained(plain.engine.model.path, dtype=torch.float32)
    text = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.inference_mode():
        log_probs = torch.log_softmax(model(text).logits[0], dim=-1)
    assert output.prompt_token_logprobs is not None
    assert output.prompt_token_logprobs[0] is None
    assert answer.token_logprobs is not None
    entries = [*output.prompt_token_logprobs[1:], *answer.token_logprobs]
    for position, entry in enumerate(entries):
        assert entry is not None
        token = int(text[0, position + 1])
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(log_probs[position, token]), abs=1e-4)
        assert entry.rank == int((log_probs[position] > log_probs[position, token]).sum()) + 1
        assert entry.top[0][0] == int(log_probs[position].argmax())


def test_chat_turns_reuse_the_conversation_and_change_no_text(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    texts: list[list[str]] = []
    for caching in (True, False):
        for spec in (None, DRAFT):
            llm = make_llm(spec, enable_prefix_caching=caching)
            messages = [
                {"role": "user", "content": "How do I list the files of a folder, and then count them?"}
            ]
            texts.append([])
            for turn in range(3):
                output = llm.chat(messages, params)[0]
                texts[-1].append(output.outputs[0].text)
                if turn:
                    expected = output.metrics.num_prompt_tokens // 2 if caching else 0
                    assert output.metrics.num_cached_tokens >= expected
                    assert caching or output.metrics.num_cached_tokens == 0
                messages += [
                    {"role": "assistant", "content": output.outputs[0].text},
                    {"role": "user", "content": f"And another way, number {turn}?"},
                ]
    assert all(turns == texts[0] for turns in texts)


def test_preemption_changes_no_text(make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]) -> None:
    """A cache for about three sequences serves twelve; with and without a draft."""
    params = SamplingParams(temperature=0.8, max_tokens=100, seed=4, ignore_eos=True)
    chosen = sorted(prompts, key=len)[:12]
    roomy = plain.generate(chosen, params)
    assert all(output.metrics.num_preemptions == 0 for output in roomy)
    reference = [output.outputs[0].token_ids for output in roomy]
    per_token = plain.engine.model.kv_bytes_per_token
    for spec in (None, DRAFT):
        room = 700 * (per_token if spec is None else int(per_token * 1.2))
        llm = make_llm(spec, kv_cache_bytes=room, max_model_len=600)
        outputs = llm.generate(chosen, params)
        assert [output.outputs[0].token_ids for output in outputs] == reference
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("rows", [48, 512])
def test_preemption_of_trees_with_several_answers_and_prompt_logprobs(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], rows: int
) -> None:
    """Everything that has to be put together again at once; few rows a step preempt prompts that are half done."""
    chosen = sorted(prompts, key=len)[8:12]
    params = [
        SamplingParams(
            temperature=0.8, seed=number, n=2, max_tokens=40, logprobs=1, prompt_logprobs=1, ignore_eos=True
        )
        for number in range(len(chosen))
    ]
    per_token = plain.engine.model.kv_bytes_per_token
    room = int(330 * 1.2) * per_token
    llm = make_llm(TREE, kv_cache_bytes=room, max_model_len=256, max_num_batched_tokens=rows)
    outputs = llm.generate(chosen, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    for prompt, wanted, output in zip(chosen, params, outputs, strict=True):
        alone = plain.generate(prompt, wanted)[0]
        assert [a.token_ids for a in output.outputs] == [a.token_ids for a in alone.outputs]
        assert [a.text for a in output.outputs] == [a.text for a in alone.outputs]
        assert output.prompt_token_logprobs is not None
        assert alone.prompt_token_logprobs is not None
        pairs = [
            (output.prompt_token_logprobs, alone.prompt_token_logprobs),
            *(
                (a.token_logprobs, b.token_logprobs)
                for a, b in zip(output.outputs, alone.outputs, strict=True)
            ),
        ]
        for ours, theirs in pairs:
            for a, b in zip(ours or [], theirs or [], strict=True):
                if a is None or b is None:
                    assert a is b
                    continue
                assert a.token_id == b.token_id
                assert math.isclose(a.logprob, b.logprob, abs_tol=1e-3)
        assert len(output.prompt_token_logprobs) == len(prompt)
        assert all(len(a.token_logprobs or []) == len(a.token_ids) for a in output.outputs)


def test_one_long_request_is_limited_by_the_cache_not_crashed(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(kv_cache_bytes=300 * 15360, kv_cache_dtype="float32")
    limit = llm.engine.max_model_len
    assert limit < 300
    prompt = min(prompts, key=len)
    answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))[0].outputs[
        0
    ]
    assert len(prompt) + len(answer.token_ids) == limit
    assert answer.finish_reason == "length"


def test_abort_frees_everything_at_once(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm(DRAFT).engine
    for number, prompt in enumerate(prompts[:6]):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=50, n=2, ignore_eos=True))
    for _ in range(4):
        engine.step()
    updates = [update for number in range(6) for update in engine.abort(str(number))]
    assert {update.finish_reason for update in updates} <= {"abort"}
    assert sum(update.output is not None for update in updates) == 6
    assert not engine.has_unfinished
    assert engine.integrity() == []
    assert engine.abort("unknown") == []


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([4096], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([5] * 2048, "2048"),
        ([1.5], "token ids"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(plain: LLM, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        plain.generate([[5], prompt])
    assert plain.engine.integrity() == []


def test_bad_parameters_are_refused(plain: LLM) -> None:
    with pytest.raises(RequestError, match="3 sampling parameters for 1 prompts"):
        plain.generate([[5]], [SamplingParams()] * 3)
    with pytest.raises(RequestError, match="4096"):
        plain.generate([5], SamplingParams(allowed_token_ids=[4096]))
    plain.engine.add_request("twice", [5])
    with pytest.raises(RequestError, match="in use"):
        plain.engine.add_request("twice", [5])
    plain.engine.abort("twice")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_num_seq": 3}, ConfigError, "max_num_seqs"),
        ({"dtype": "float8"}, ConfigError, "did you mean 'float"),
        ({"device": "gpu0"}, ConfigError, "cuda"),
        ({"max_num_seqs": 0}, ConfigError, "at least 1"),
        ({"kv_cache_bytes": 1000}, CapacityError, "kv_cache_bytes"),
        ({"kv_memory_fraction": 1.5}, ConfigError, "kv_memory_fraction"),
        ({"model": "/nowhere"}, ModelError, "not a folder"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, ConfigError, '"method"'),
        ({"speculative_config": {"method": "ngrams"}}, ConfigError, "ngram"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_token": 3}},
            ConfigError,
            "num_speculative_tokens",
        ),
        ({"speculative_config": {"method": "ngram", "verifier": "block_"}}, ConfigError, "block"),
        ({"speculative_config": {"method": "draft_model"}}, ConfigError, "model"),
        (
            {"speculative_config": {**DRAFT, "draft_sample_method": "coupled", "verifier": "block"}},
            ConfigError,
            "coupled",
        ),
        (
            {"speculative_config": {**DRAFT, "num_speculative_tokens": 0}},
            ConfigError,
            "num_speculative_tokens",
        ),
    ],
)
def test_bad_configurations_are_refused(
    make_llm: MakeLLM, options: dict[str, Any], error: type, says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        make_llm(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "slipstream.testing.stub_drafters:RaisingDrafter", "at_call": 3},
        {"method": "slipstream.testing.stub_drafters:RaisingDrafter", "sequence_id": 1},
        {"method": "slipstream.testing.stub_drafters:OverBudgetDrafter"},
    ],
    ids=["later", "one", "over-budget"],
)
def test_a_faulty_drafter_is_retired_and_the_answers_come(
    make_llm: MakeLLM,
    plain: LLM,
    prompts: list[list[int]],
    spec: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    reference = [output.outputs[0].token_ids for output in plain.generate(prompts[:4], params)]
    texts = [prompt + answer for prompt, answer in zip(prompts, reference, strict=False)]
    llm = make_llm({**spec, "texts": texts})
    outputs = llm.generate(prompts[:4], params)
    assert [output.outputs[0].token_ids for output in outputs] == reference
    failures = llm.engine.stats().num_draft_failures
    assert failures == 1 if "sequence_id" in spec else failures > 1
    assert sum("retired" in record.message for record in caplog.records) == 1, "logged once"
    served = [output.metrics.num_accepted_tokens > 0 for output in outputs]
    if "sequence_id" in spec:
        assert served == [True, False, True, True], "the others keep their drafts"


def test_draft_that_is_always_right_or_always_wrong(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    reference = plain.generate(prompts[0], params)[0].outputs[0].token_ids
    for accuracy, steps in ((1.0, 5), (0.0, 21)):
        config = {"method": ORACLE, "texts": [prompts[0] + reference], "accuracy": accuracy}
        output = make_llm(config).generate(prompts[0], params)[0]
        assert output.outputs[0].token_ids == reference
        assert output.metrics.num_steps == steps


def test_off_costs_nothing_and_counts_nothing(plain: LLM, prompts: list[list[int]]) -> None:
    metrics = plain.generate(prompts[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[
        0
    ].metrics
    assert metrics.num_draft_tokens == metrics.num_accepted_tokens == 0
    assert metrics.acceptance_length == 1
    assert metrics.acceptance_histogram == [8]


def test_long_prompts_and_short_answers_are_drafted_from_the_first_token(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    """Eight prompts take many steps to compute; the draft computes them in the same steps, not afterwards."""
    llm = make_llm(DRAFT, max_num_batched_tokens=64)
    text = [token for prompt in prompts for token in prompt]
    chosen = [text[start : start + 150] for start in range(0, 800, 100)]
    outputs = llm.generate(chosen, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for output in outputs:
        undrafted = output.metrics.num_steps - output.metrics.proposed_per_position[0]
        assert undrafted <= 2, "but for the last token, which leaves no room for a draft"
