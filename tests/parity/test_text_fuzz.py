"""Random requests, random parameters, random batches, too little memory: every answer is the one without speculation.

The engine's kernels give a row the same bits in any batch, so the comparison is exact: tokens, text, reason, and what
was said of each token but for its log-probability's last bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from cut_draft import save_cut_draft
from trained_heads import trained_heads

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, sample_prompts
from slipstream.engine.outputs import CompletionOutput
from slipstream.text.prompts import encode_chat
from tests.kit.marks import needs_kernels
from tests.kit.pard_models import pard2_folder, pard_folder
from tests.kit.peagle_heads import masked_eagle3

pytestmark = [
    pytest.mark.long,
    needs_kernels,
]

NUM_REQUESTS = 240
MAX_TOKENS = 24
NUM_SLOTS = 400
"""Slots of a cache that is too small: for one request of the longest kind, or three short ones."""
TRAINED, OTHER_VOCABULARY, MASKED = "trained on the spot", "another tokenizer", "reads mask tokens"
READS_STATES = "reads the target's states too"
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix-tree": {"method": "suffix", "tree": True},
    "token_recycling": {"method": "token_recycling"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "draft-chain": DRAFT,
    "draft-tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 10},
    "tli": {"method": "tli", "model": OTHER_VOCABULARY},
    "slem": {"method": "slem", "model": OTHER_VOCABULARY},
    "pard": {"method": "pard", "model": MASKED},
    "pard2": {"method": "pard", "model": READS_STATES},
    "self": {"method": "self"},
    "layer_skip": {"method": "layer_skip", "drafts_per_trial": 8},
    "cascade": {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}},
    "medusa": {"method": "medusa", "model": TRAINED, "tree_top_k": 3, "num_draft_nodes": 10},
    "hydra": {"method": "hydra", "model": TRAINED},
    "eagle": {"method": "eagle", "model": TRAINED, "num_speculative_tokens": 3, "num_draft_nodes": 8},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    "mtp": {"method": "mtp", "model": TRAINED, "tree_top_k": 2, "num_draft_nodes": 6},
    "dflash": {"method": "dflash", "model": TRAINED},
    "peagle": {"method": "peagle", "model": MASKED},
    "ensemble": {
        "method": "ensemble",
        "members": [{"method": "suffix"}, {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 8}],
        "num_draft_nodes": 12,
    },
    "auto": {"method": "auto", "drafters": [{"method": "suffix"}, DRAFT]},
}
STRUCTURED: list[dict[str, Any]] = [
    {"regex": "[a-z]{3,20}( [a-z]{1,9}){0,4}"},
    {"choice": ["yes", "no", "neither of the two"]},
    {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
]

PREEMPTED: dict[str, int] = {}
"""How often sequences were preempted, by drafter."""

Job = tuple[list[int], SamplingParams]


def any_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mixture of the parameters that `SamplingParams` has."""

    def sometimes(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    return SamplingParams(
        n=sometimes(0.15, 2, 1),
        temperature=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.6]),
        top_k=rng.choice([0, -1, 1, 3, 40, 10_000]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.02, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5, -0.3]),
        logit_bias=sometimes(0.2, {rng.randrange(vocab_size): rng.uniform(-8, 8) for _ in range(5)}, None),
        min_tokens=rng.choice([0, 0, 4]),
        max_tokens=rng.randint(4, MAX_TOKENS),
        bad_words=sometimes(0.2, ["the", " a", "SELECT name", "."], ()),
        allowed_token_ids=sometimes(0.1, sorted(rng.sample(range(vocab_size), 700)), None),
        seed=rng.randrange(2**62),
        stop=sometimes(0.2, [" of", "e\n", "s "], ()),
        stop_token_ids=sometimes(0.1, rng.sample(range(vocab_size), 40), ()),
        ignore_eos=rng.random() < 0.3,
        include_stop_str_in_output=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 4]),
        skip_special_tokens=rng.random() < 0.7,
        structured=sometimes(0.15, rng.choice(STRUCTURED), None),
    )


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(kv_cache_bytes=64 * 2**20)


@pytest.fixture(scope="module")
def jobs(plain: LLM) -> list[Job]:
    """Prompts of the embedded tasks, cut anywhere, some twice so that their beginnings are reused."""
    rng = random.Random(11)
    tokenizer = plain.engine.tokenizer
    texts = [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:60]]
    return [
        (
            (text := rng.choice(texts))[: rng.randint(1, min(len(text), 260))],
            any_params(rng, plain.engine.model.vocab_size),
        )
        for _ in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def reference(plain: LLM, jobs: list[Job]) -> list[list[CompletionOutput]]:
    """Each request alone, without speculation."""
    return [plain.generate(prompt, params)[0].outputs for prompt, params in jobs]


@pytest.fixture(scope="module")
def cut_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_cut_draft(tmp_path_factory.mktemp("pair") / "draft")


def batches(rng: random.Random, number: int) -> Iterator[range]:
    """0 to `number` in batches of random sizes."""
    begin = 0
    while begin < number:
        end = min(begin + rng.choice([1, 2, 5, 12, 30]), number)
        yield range(begin, end)
        begin = end


@pytest.mark.parametrize("short_of_memory", [False, True], ids=["roomy", "preempting"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_answer_is_that_of_speculation_off(
    spec: str, short_of_memory: bool, jobs: list[Job], reference: list[list[CompletionOutput]], cut_draft: str
) -> None:
    config = dict(SPECS[spec])
    if config.get("model") == TRAINED:
        config["model"] = trained_heads(config["method"])
    elif config.get("model") == OTHER_VOCABULARY:
        config["model"] = cut_draft
    elif config.get("model") == READS_STATES:
        config["model"] = pard2_folder()
    elif config.get("model") == MASKED:
        config["model"] = pard_folder() if spec == "pard" else masked_eagle3()
    rng = random.Random(spec)
    options: dict[str, Any] = {"speculative_config": config, "max_model_len": 288}
    llm = LLM(**options, kv_cache_bytes=64 * 2**20)
    if short_of_memory:
        per_token = llm.engine.memory_plan.kv_bytes_per_token
        bounds = {"kv_cache_bytes": NUM_SLOTS * per_token, "max_num_batched_tokens": 96}
        llm = LLM(**options, **bounds, max_num_seqs=16)
    share = range(len(jobs)) if not short_of_memory else range(0, len(jobs), 3)
    chosen = [jobs[i] for i in share]
    num_accepted = num_preempted = 0
    for batch in batches(rng, len(chosen)):
        outputs = llm.generate([chosen[i][0] for i in batch], [chosen[i][1] for i in batch])
        for i, output in zip(batch, outputs, strict=True):
            num_accepted += output.metrics.num_accepted_tokens
            num_preempted += output.metrics.num_preemptions
            told = f"request {share[i]}: {chosen[i][1]}"
            for ours, theirs in zip(output.outputs, reference[share[i]], strict=True):
                assert list(ours.token_ids) == list(theirs.token_ids), told
                assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), told
                assert (ours.logprobs is None) == (theirs.logprobs is None), told
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    # What `auto` drafts goes by the time that steps take; its drafters are held to it each by itself.
    assert num_accepted > 20 or spec == "auto", "next to nothing was drafted, so next to nothing was shown"
    if short_of_memory:
        PREEMPTED[spec] = num_preempted


def test_memory_was_short() -> None:
    assert not PREEMPTED or sum(PREEMPTED.values()) > 0


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("spec", ["draft-chain", "draft-tree", "suffix-tree", "medusa"])
def test_greedy_answers_do_not_depend_on_the_verifier(
    spec: str, verifier: str, jobs: list[Job], reference: list[list[CompletionOutput]]
) -> None:
    config = {**SPECS[spec], "verifier": verifier}
    if config.get("model") == TRAINED:
        config["model"] = trained_heads(config["method"])
    llm = LLM(speculative_config=config, kv_cache_bytes=64 * 2**20)
    greedy = [i for i, (_, params) in enumerate(jobs) if params.temperature == 0]
    outputs = llm.generate([jobs[i][0] for i in greedy], [jobs[i][1] for i in greedy])
    for i, output in zip(greedy, outputs, strict=True):
        told = f"request {i}: {jobs[i][1]}"
        assert [list(a.token_ids) for a in output.outputs] == [list(a.token_ids) for a in reference[i]], told
