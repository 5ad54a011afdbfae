"""The point of it all: on a real trained pair, speculation changes speed and nothing else.

14 held-out prompts, the shortest of seven tasks, in float32 and int8, for each drafter, chains and trees, decoded in
batches whose mixture differs from run to run. In our own kernels a row has the same bits in any batch, so every text
is equal. PyTorch's do not promise that: where a text differs there, the test shows that the target itself was
undecided, the two tokens' scores, recomputed alone, differing by less than float32 arithmetic resolves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from cut_draft import save_cut_draft
from trained_heads import trained_heads
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, sample_prompts
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.text.prompts import encode_chat
from tests.kit.pard_models import pard_folder
from tests.kit.peagle_heads import masked_eagle3

NUM_PROMPTS = 14
MAX_TOKENS = 20
NEAR_TIE = 1e-3
"""In logits; rows computed in another batch differ by about 1e-5."""
MAX_FLIPS = 2
"""Texts of a run in PyTorch's kernels that may differ at all; each must be a near tie."""

TRAINED, MASKED = "trained on the spot", "reads mask tokens"
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
EAGLE3 = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix-tree": {"method": "suffix", "tree": True},
    "draft-chain": DRAFT,
    "draft-confident": {**DRAFT, "confidence_threshold": 0.1},
    "draft-tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 10},
    "draft-greedy-rejection": {**DRAFT, "verifier": "rejection", "draft_sample_method": "greedy"},
    "draft-block": {**DRAFT, "verifier": "block"},
    "draft-int8": {**DRAFT, "quantization": "int8"},
    "pard-chain": {"method": "pard", "model": MASKED},
    "pard-tree": {"method": "pard", "model": MASKED, "tree_top_k": 3, "num_draft_nodes": 10},
    "self-int8": {"method": "self"},
    "self-int4": {"method": "self", "quantization": "int4"},
    "medusa-chain": {"method": "medusa", "model": TRAINED},
    "medusa-tree": {"method": "medusa", "model": TRAINED, "tree_top_k": 3, "num_draft_nodes": 10},
    "hydra-tree": {"method": "hydra", "model": TRAINED, "tree_top_k": 3, "num_draft_nodes": 10},
    "hydra-block": {"method": "hydra", "model": TRAINED, "verifier": "block"},
    "eagle3-tree": {"method": "eagle3", "model": TRAINED},
    "eagle3-chain": {**EAGLE3, "tree_top_k": 1, "num_draft_nodes": None},
    "eagle3-wide-tree": {**EAGLE3, "num_speculative_tokens": 7, "tree_top_k": 10, "num_draft_nodes": 60},
    "eagle3-int8": {**EAGLE3, "quantization": "int8"},
    "eagle-tree": {"method": "eagle", "model": TRAINED, "num_speculative_tokens": 3, "num_draft_nodes": 8},
    "eagle3-rejection": {**EAGLE3, "verifier": "rejection", "tree_top_k": 1, "num_draft_nodes": None},
    "dflash-chain": {"method": "dflash", "model": TRAINED},
    "dflash-tree": {"method": "dflash", "model": TRAINED, "tree_top_k": 3, "num_draft_nodes": 10},
    "dflash-block": {"method": "dflash", "model": TRAINED, "verifier": "block"},
    "peagle-chain": {"method": "peagle", "model": MASKED},
    "peagle-tree": {"method": "peagle", "model": MASKED, "tree_top_k": 3, "num_draft_nodes": 10},
    "peagle-block": {"method": "peagle", "model": MASKED, "verifier": "block"},
    "eagle3-two-layers": {"method": "eagle3", "model": MASKED},
    "remote": {"method": "tests.kit.loopback:LoopbackDrafter", "draft": DRAFT},
    "token-recycling": {"method": "token_recycling"},
    "siblings": {"method": "siblings", "share": "tenant"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "ensemble-merge": {
        "method": "ensemble",
        "members": [{"method": "suffix"}, {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 8}],
        "num_draft_nodes": 12,
    },
    "ensemble-vote": {"method": "ensemble", "mode": "vote", "members": [{"method": "ngram"}, DRAFT]},
    "ensemble-first": {
        "method": "ensemble",
        "mode": "first",
        "min_tokens": 2,
        "members": [{"method": "suffix"}, DRAFT],
    },
    "auto": {"method": "auto", "drafters": [{"method": "suffix"}, {**DRAFT, "num_speculative_tokens": 6}]},
    "auto-block": {
        "method": "auto",
        "verifier": "block",
        "drafters": [{"method": "token_recycling"}, EAGLE3],
    },
    "tli-chain": {"method": "tli"},
    "tli-tree": {"method": "tli", "tree_top_k": 3, "num_draft_nodes": 10},
    "slem": {"method": "slem"},
    "slem-sampled": {"method": "slem", "draft_temperature": 0.8},
    "layers-given": {"method": "layer_skip", "skip_layers": [2, 3]},
    "layers-exit-tree": {"method": "layer_skip", "exit_layer": 4, "tree_top_k": 3, "num_draft_nodes": 8},
    "layers-online": {"method": "layer_skip", "drafts_per_trial": 8},
    "layers-online-int8": {"method": "layer_skip", "quantization": "int8", "drafts_per_trial": 8},
    "cascade-ngram": {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}},
    "cascade-int8-draft": {"method": "cascade", "draft": DRAFT},
    "cascade-layers": {
        "method": "cascade",
        "exit_layer": 4,
        "draft": {"method": "layer_skip", "exit_layer": 2},
    },
}
QUANTISED = (
    "ngram",
    "suffix-tree",
    "draft-chain",
    "draft-tree",
    "medusa-chain",
    "hydra-tree",
    "dflash-chain",
    "layers-online",
    "cascade-ngram",
)
"""The drafters that are tried with an int8 target too."""
LONG = (
    *("suffix", "draft-confident", "self-int4", "medusa-chain", "hydra-block", "eagle3-tree", "eagle3-chain"),
    *(
        "eagle3-wide-tree",
        "eagle3-int8",
        "dflash-block",
        "auto-block",
        "ensemble-vote",
        "ensemble-first",
        "tli-tree",
    ),
    *("pard-tree", "peagle-chain", "peagle-block"),
    *("slem-sampled", "layers-given", "layers-online", "layers-online-int8", "cascade-layers"),
)
"""What `make test-long` tries: another setting of each of these methods is tried by `make test`."""
OTHER_VOCABULARY = ("tli", "slem")
"""Methods whose draft gets another tokenizer than the target."""


@pytest.fixture(scope="module", autouse=True)
def another_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_cut_draft(tmp_path_factory.mktemp("pair") / "draft")
    for spec in SPECS.values():
        if spec["method"] in OTHER_VOCABULARY:
            spec["model"] = folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The same number of each task. A long prompt costs more than its answer, and how prompts are read is tested
    elsewhere."""
    tokenizer = LLM().engine.tokenizer
    by_task: dict[str, list[list[int]]] = {}
    for row in sample_prompts():
        by_task.setdefault(row["task"], []).append(encode_chat(tokenizer, row["messages"]))
    number = NUM_PROMPTS // len(by_task)
    return [prompt for prompts in by_task.values() for prompt in sorted(prompts, key=len)[:number]]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The texts without speculation: greedy, and seeded at temperature 0.8."""
    return texts_without_speculation(prompts)


@pytest.fixture(scope="module")
def quantised_references(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The same with an int8 target."""
    return texts_without_speculation(prompts, quantization="int8")


def texts_without_speculation(prompts: list[list[int]], **engine: Any) -> dict[str, list[list[int]]]:
    llm = LLM(max_num_seqs=16, **engine)
    return {
        mode: [output.outputs[0].token_ids for output in llm.generate(prompts, params(mode))]
        for mode in ("greedy", "seeded")
    }


def params(mode: str) -> list[SamplingParams]:
    temperature = 0.0 if mode == "greedy" else 0.8
    return [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
        for number in range(NUM_PROMPTS)
    ]


def modes_of(name: str) -> list[str]:
    """The classical verifiers keep the distribution, not the draw: there is no seeded text to compare with."""
    return ["greedy", "seeded"] if SPECS[name].get("verifier", "coupled") == "coupled" else ["greedy"]


def speculate(
    name: str, modes: Seq[str], prompts: list[list[int]], **engine: Any
) -> tuple[LLM, dict[str, list[list[int]]]]:
    """The texts of the prompts in order, by mode: decoded together, in another order and batch than those without
    speculation."""
    config = SPECS[name]
    if config.get("model") == TRAINED:
        config = {**config, "model": trained_heads(config["method"])}
    elif config.get("model") == MASKED:
        config = {**config, "model": pard_folder() if config["method"] == "pard" else masked_eagle3(2)}
    llm = LLM(speculative_config=config, max_num_seqs=5 + 3 * list(SPECS).index(name), **engine)
    requests = [(mode, number) for mode in modes for number in range(NUM_PROMPTS)]
    requests.sort(key=lambda request: (request[1] * 37) % NUM_PROMPTS)
    wanted = {mode: params(mode) for mode in modes}
    outputs = llm.generate([prompts[i] for _, i in requests], [wanted[mode][i] for mode, i in requests])
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    given = dict(zip(requests, outputs, strict=True))
    if config["method"] != "auto":  # which may find that it does not pay here
        for mode in modes:
            accepted = [given[mode, number].metrics.num_accepted_tokens for number in range(NUM_PROMPTS)]
            assert sum(accepted) > NUM_PROMPTS // 4, mode
    return llm, {
        mode: [given[mode, number].outputs[0].token_ids for number in range(NUM_PROMPTS)] for mode in modes
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SPECS]
)
def test_texts_are_those_without_speculation(
    name: str, prompts: list[list[int]], references: dict[str, list[list[int]]]
) -> None:
    llm, texts = speculate(name, modes_of(name), prompts)
    assert isinstance(llm.engine.model.executor, CpuKernels)
    for mode in texts:
        assert texts[mode] == references[mode], mode


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("name", ["suffix", "draft-chain", "draft-tree"])
def test_so_they_are_where_all_are_greedy_or_none_is(
    name: str, mode: str, prompts: list[list[int]], references: dict[str, list[list[int]]]
) -> None:
    assert speculate(name, [mode], prompts)[1] == {mode: references[mode]}


@pytest.mark.parametrize("name", QUANTISED)
def test_an_int8_target_says_the_same_with_and_without_speculation(
    name: str, prompts: list[list[int]], quantised_references: dict[str, list[list[int]]]
) -> None:
    assert speculate(name, modes_of(name), prompts, quantization="int8")[1] == quantised_references


def test_an_int4_target_says_the_same_with_and_without_speculation(prompts: list[list[int]]) -> None:
    """Its draft is in int4 too."""
    references = texts_without_speculation(prompts, quantization="int4")
    for name in ("suffix", "draft-tree"):
        assert speculate(name, modes_of(name), prompts, quantization="int4")[1] == references


def test_in_pytorchs_kernels_only_near_ties_flip(prompts: list[list[int]]) -> None:
    references = texts_without_speculation(prompts, cpu_kernels="torch")["greedy"]
    llm, by_mode = speculate("draft-chain", ["greedy"], prompts, cpu_kernels="torch")
    texts = by_mode["greedy"]
    flipped = [number for number in range(NUM_PROMPTS) if texts[number] != references[number]]
    for number in flipped:
        margin = margin_at_divergence(llm, prompts[number], texts[number], references[number])
        print(f"prompt {number}: near-tie flip, margin {margin:.2e}")
        assert margin < NEAR_TIE
    assert len(flipped) <= MAX_FLIPS


def margin_at_divergence(llm: LLM, prompt: list[int], text: list[int], reference: list[int]) -> float:
    """How far apart the target scores the two tokens at which the greedy texts part."""
    at = next(i for i, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b)
    alone = AutoModelForCausalLM.from_pretrained(llm.engine.model.path, dtype=torch.float32)
    with torch.inference_mode():
        logits = alone(torch.tensor([[*prompt, *reference[:at]]])).logits[0, -1]
    return float((logits[text[at]] - logits[reference[at]]).abs())
