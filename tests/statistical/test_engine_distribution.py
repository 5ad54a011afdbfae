"""The real engine on the real pair: sampled answers follow the target's exact distribution, whatever drafts.

The enumeration grid proves the verifiers; this catches what lies around them (wrong rows, wrong q, reused noise).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup
from slipstream.text.prompts import encode_chat

NUM_SAMPLES = 240
NUM_REPEATED = 100
NUM_TOKENS = 3
TOP_K = 3
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
"""A tree whose siblings are drawn without replacement where the verifier judges by probabilities."""
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return encode_chat(LLM().engine.tokenizer, sample_prompts()[3]["messages"])


@pytest.fixture(scope="module")
def truth(prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every answer of three tokens, from 13 passes of the target."""
    model = LLM().engine.model

    def next_tokens(path: tuple[int, ...]) -> dict[int, float]:
        text = [*prompt, *path]
        pool = KVPool(model.shapes, len(text), model.dtype, model.device)
        logits = model.forward([RowGroup(pool.slots, 0, text, [len(text) - 1])], pool).logits[0].double()
        top = logits.topk(TOP_K)
        return dict(zip(top.indices.tolist(), torch.softmax(top.values, 0).tolist(), strict=True))

    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        children = {path: next_tokens(path) for path in paths}
        paths = {(*path, token): paths[path] * p for path in paths for token, p in children[path].items()}
    assert len(paths) == TOP_K**NUM_TOKENS
    assert sum(paths.values()) == pytest.approx(1)
    return paths


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "off"},
        DRAFT,
        {**DRAFT, "tree_top_k": 2, "num_draft_nodes": 6},
        {**DRAFT, "verifier": "rejection"},
        {**DRAFT, "verifier": "block"},
        {**DRAFT, "verifier": "rejection", "tree_top_k": 2, "num_draft_nodes": 6},
        {**DRAFT, "verifier": "rejection", "tree_choices": CHOICES},
        {**DRAFT, "verifier": "block", "tree_choices": CHOICES},
        {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}, "verifier": "rejection"},
        {"method": "layer_skip", "skip_layers": [2, 3], "num_speculative_tokens": 3, "verifier": "rejection"},
        {"method": "token_recycling", "verifier": "rejection"},
    ],
    ids=[
        *("off", "coupled", "coupled-tree", "rejection", "block", "rejection-tree"),
        *("rejection-sampled-tree", "block-sampled-tree", "cascade", "layers", "token-recycling"),
    ],
)
def test_answers_follow_the_targets_distribution(
    spec: dict[str, Any], prompt: list[int], truth: dict[tuple[int, ...], float]
) -> None:
    outputs = LLM(speculative_config=spec).generate([prompt] * NUM_SAMPLES, params())
    assert p_value(outputs, truth) > 1e-3


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_an_answer_of_the_same_seed_that_is_remembered_is_no_hint(
    verifier: str, prompt: list[int], truth: dict[tuple[int, ...], float]
) -> None:
    """`suffix` drafts the earlier answer; were its coins thrown again, it would be accepted far too often."""
    llm = LLM(speculative_config={"method": "suffix", "verifier": verifier}, seed=0)
    rounds = [
        [llm.generate([prompt], one)[0] for _ in range(2)] for one in params()[:NUM_REPEATED]
    ]  # one by one: the second of each seed meets the first one's answer
    drafted = sum(second.metrics.num_draft_tokens for _, second in rounds)
    assert drafted > NUM_REPEATED // 2
    assert p_value([second for _, second in rounds], truth) > 1e-3


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1, top_k=TOP_K, max_tokens=NUM_TOKENS + 1, ignore_eos=True, seed=seed)
        for seed in range(NUM_SAMPLES)
    ]


def p_value(outputs: list[RequestOutput], truth: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of the hypothesis that the first tokens of the answers follow `truth`."""
    number = len(outputs)
    counts = Counter(tuple(output.outputs[0].token_ids[:NUM_TOKENS]) for output in outputs)
    assert set(counts) <= set(truth)
    common = [path for path in truth if truth[path] * number >= 5]
    observed = [counts[path] for path in common]
    expected = [truth[path] * number for path in common]
    rest = number - sum(observed), number - sum(expected)
    if rest[1] > 1e-6:
        observed.append(rest[0])
        expected.append(rest[1])
    assert len(common) > 4
    return float(chisquare(observed, expected).pvalue)
