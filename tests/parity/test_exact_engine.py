"""The exact grid on the real engine and pair: every drafter, enumerated, leaves the target's distribution alone.

`tests/exact` proves the verifiers on table models. Here every random decision that engine, drafter and verifier make is
taken in turn, so a wrong row or a wrong q shows as a gap, without sampling error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_draft import save_cut_draft
from safetensors.torch import save_file
from trained_heads import trained_heads, twice_mtp

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.control.policy import Policy
from slipstream.control.types import NO_DRAFTER, Choice, StepRequest
from slipstream.core.proposal import Proposal, ProposalKind
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.registry import drafter_names
from slipstream.testing.enumeration import Distribution, total_variation
from tests.kit.block_heads import LAYOUTS, block_head
from tests.kit.engine_enumeration import engine_distribution
from tests.kit.pard_models import pard2_folder, pard_folder
from tests.kit.peagle_heads import masked_eagle3

PARAMS = SamplingParams(temperature=1.0, top_k=2, max_tokens=4, ignore_eos=True)
"""Sixteen answers; the first token comes with the prompt, before any draft."""
TEXT = "one two three one two"
CLOSE = 1e-5
"""A row that is computed in another batch differs in the last bits of its float32 numbers."""
CHOICES = [[0], [1], [0, 0]]
TREE: dict[str, Any] = {"tree_choices": CHOICES}
CHAIN: dict[str, Any] = {"num_speculative_tokens": 2}
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
LOOPBACK = "tests.kit.loopback:LoopbackDrafter"
"""`remote`, with its worker in the process."""
TRAINED, TWO_LAYERS, OTHER_VOCABULARY = "trained on the spot", "two layers", "another tokenizer"
MASKED, READS_STATES = "reads mask tokens", "reads the target's states too"
LEARNED = "a layer on the logits"
SPECS: list[dict[str, Any]] = [  # rejection and block verification in turn
    {"method": "ngram", **CHAIN},
    {"method": "suffix", **CHAIN},
    {"method": "token_recycling"},
    {"method": "siblings", "share": "tenant"},
    {"method": "siblings", "share": "tenant", "min_path_prob": 0.01},
    {"method": "lookahead"},
    {"method": "jacobi", **CHAIN},
    {**DRAFT, **CHAIN},
    {**DRAFT, **CHAIN, "confidence_threshold": 0.45},
    {**DRAFT, "num_speculative_tokens": 3, "confidence_threshold": 0.2},
    {**DRAFT, **TREE},
    {**DRAFT, **CHAIN, "draft_sample_method": "greedy"},
    {**DRAFT, "tree_top_k": 2, "num_draft_nodes": 4, **CHAIN},
    {"method": "pard", "model": MASKED, **CHAIN},
    {"method": "pard", "model": MASKED, **TREE},
    {"method": "pard", "model": MASKED, **CHAIN, "confidence_threshold": 0.02},
    {"method": "pard", "model": MASKED, "tree_top_k": 2, "num_draft_nodes": 4, **CHAIN},
    {"method": "pard", "model": READS_STATES, **CHAIN},
    {"method": "pard", "model": READS_STATES, **TREE},
    {"method": "tli", "model": OTHER_VOCABULARY, **CHAIN},
    {"method": "tli", "model": OTHER_VOCABULARY, **TREE},
    {"method": "slem", "model": OTHER_VOCABULARY, **CHAIN},
    # Sampled drafts would need their distributions, which a worker does not send.
    {"method": LOOPBACK, "draft": {**DRAFT, "draft_sample_method": "greedy"}, **CHAIN},
    {"method": LOOPBACK, "draft": {"method": "ngram"}, **CHAIN},
    {"method": "self", **CHAIN},
    {"method": "self", **TREE},
    {"method": "layer_skip", "skip_layers": [2, 3], **CHAIN},
    {"method": "layer_skip", "skip_layers": [4], **TREE},
    {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}, **CHAIN},
    # Inner and outer drafts share their noise on purpose; only decisions that are taken once can be enumerated.
    {
        "method": "cascade",
        "draft": {**DRAFT, "num_speculative_tokens": 1, "draft_sample_method": "greedy"},
        **CHAIN,
    },
    {"method": "cascade", "skip_layers": [4], "draft": {"method": "ngram"}, **CHAIN},
    {
        "method": "cascade",
        "exit_layer": 5,
        "draft": {"method": "ngram"},
        **CHAIN,
        "confidence_threshold": 0.3,
    },
    {"method": "medusa", "model": TRAINED, **CHAIN},
    {"method": "medusa", "model": TRAINED, **TREE},
    {"method": "hydra", "model": TRAINED, **CHAIN},
    {"method": "hydra", "model": TRAINED, **TREE},
    {"method": "eagle", "model": TRAINED, **CHAIN, "tree_top_k": 1, "num_draft_nodes": None},
    {"method": "eagle", "model": TRAINED, **TREE, "tree_top_k": 1, "num_draft_nodes": None},
    {"method": "eagle3", "model": EMBEDDED_EAGLE3, **CHAIN, "tree_top_k": 1, "num_draft_nodes": None},
    {"method": "eagle3", "model": EMBEDDED_EAGLE3, **TREE, "tree_top_k": 1, "num_draft_nodes": None},
    {"method": "mtp", "model": TRAINED, **CHAIN},
    {"method": "mtp", "model": TRAINED, **TREE},
    {"method": "mtp", "model": TWO_LAYERS, **CHAIN},
    {"method": "mtp", "model": TWO_LAYERS, **TREE},
    {"method": "peagle", "model": MASKED, **CHAIN},
    {"method": "peagle", "model": MASKED, **TREE},
    {"method": "peagle", "model": MASKED, **CHAIN, "confidence_threshold": 0.02},
    {"method": "peagle", "model": MASKED, "tree_top_k": 2, "num_draft_nodes": 4, **CHAIN},
    {"method": "dflash", "model": TRAINED, **CHAIN},
    {"method": "dflash", "model": TRAINED, **TREE},
    {"method": "dflash", "model": TRAINED, "tree_top_k": 2, "num_draft_nodes": 4, **CHAIN},
    {"method": "dflash", "model": "pruned", "tree_top_k": 2, "num_draft_nodes": 4, **CHAIN},
    {"method": "dflash", "model": "mask", **CHAIN},
    {"method": "dflash", "model": "mask", "num_speculative_tokens": 3},
    {"method": "dflash", "model": "dflash2", **CHAIN, "confidence_threshold": 0.1},
    {"method": "dflash", "model": "markov", **CHAIN, "confidence_threshold": 0.3},
    {"method": "dflash", "model": "rnn", **TREE},
    {"method": "ensemble", "mode": "first", "members": [{"method": "ngram"}, {**DRAFT, **CHAIN}]},
    {
        "method": "ensemble",
        "members": [{"method": "ngram"}, {**DRAFT, **CHAIN, "draft_sample_method": "greedy"}],
    },
    {"method": "auto", "drafters": [{"method": "ngram"}, {**DRAFT, **CHAIN}]},
    {"method": "auto", "drafters": [{"method": "ngram"}, {**DRAFT, **CHAIN}]},
    {"method": "versions", "drafter": {**DRAFT, **CHAIN}, "versions": {"v1": {**DRAFT, **CHAIN}}},
    {"method": "versions", "drafter": {**DRAFT, **CHAIN}, "versions": {"v1": {**DRAFT, **CHAIN}}},
    {**DRAFT, **CHAIN, "correction": LEARNED},
    {**DRAFT, **TREE, "correction": LEARNED},
    {
        "method": "eagle3",
        "model": EMBEDDED_EAGLE3,
        **CHAIN,
        "tree_top_k": 1,
        "num_draft_nodes": None,
        "correction": LEARNED,
    },
]


def name(spec: dict[str, Any]) -> str:
    shape = "tree" if TREE.keys() & spec.keys() or spec.get("tree_top_k", 1) > 1 else "chain"
    return "-".join(
        [
            f"remote {spec['draft']['method']}" if spec["method"] == LOOPBACK else spec["method"],
            shape,
            *(str(spec[k]) for k in ("draft_sample_method", "mode", "confidence_threshold") if k in spec),
            *([spec["model"]] if spec.get("model") in (TWO_LAYERS, *LAYOUTS) else []),
            *(["corrected"] if "correction" in spec else []),
        ]
    )


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(LLM().engine.tokenizer(TEXT).input_ids)


@pytest.fixture(scope="module")
def truth(prompt: list[int]) -> Distribution:
    """Without speculation, by the same enumeration."""
    distribution = engine_distribution(LLM(), prompt, PARAMS)
    assert len(distribution) == 2**PARAMS.max_tokens
    assert sum(distribution.values()) == pytest.approx(1)
    return distribution


@pytest.fixture(scope="module")
def cut_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_cut_draft(Path(tmp_path_factory.mktemp("pair")) / "draft")


@pytest.fixture(scope="module")
def correction(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A layer that changes the draft's distributions by much."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((4096, 2), (2, 4096)))
    file = tmp_path_factory.mktemp("correction") / "layer.safetensors"
    save_file({"left": left, "right": right, "log_temperature": torch.tensor([0.3])}, file)
    return str(file)


def test_every_drafter_is_here() -> None:
    methods = {"remote" if spec["method"] == LOOPBACK else spec["method"] for spec in SPECS}
    assert methods == set(drafter_names()) - {"off"}


def chosen_by_length(self: Policy, requests: Seq[StepRequest], num_prompt_rows: int) -> list[Choice]:
    """A lookup and a draft in turn, and nothing, of other depths each time. A run of the enumeration must not depend on
    the runs before it, as what a policy has learned does."""
    turns = [
        Choice(1, 2, lookup=0, min_tokens=2),
        Choice(1, 1),
        Choice(NO_DRAFTER, 0, lookup=0, min_tokens=1),
        Choice(1, 2),
    ]
    return [turns[each.length % 4] if each.limit >= 2 else Choice(NO_DRAFTER, 0) for each in requests]


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_the_distribution_stays(
    spec: dict[str, Any],
    prompt: list[int],
    truth: Distribution,
    cut_draft: str,
    correction: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Policy, "choose", chosen_by_length)
    given = spec
    if spec.get("correction") == LEARNED:
        spec = {**spec, "correction": correction}
    if spec.get("model") == TRAINED:
        spec = {**spec, "model": trained_heads(spec["method"])}
    elif spec.get("model") == TWO_LAYERS:
        spec = {**spec, "model": twice_mtp(tmp_path / "twice")}
    elif spec.get("model") == OTHER_VOCABULARY:
        spec = {**spec, "model": cut_draft}
    elif spec.get("model") == READS_STATES:
        spec = {**spec, "model": pard2_folder()}
    elif spec.get("model") == MASKED:
        spec = {**spec, "model": pard_folder() if spec["method"] == "pard" else masked_eagle3()}
    elif spec.get("model") in LAYOUTS:
        spec = {**spec, "model": block_head(spec["model"])}
    verifier = "block" if SPECS.index(given) % 2 else "rejection"
    llm = LLM(speculative_config={**spec, "verifier": verifier})
    drafted: list[int] = []
    llm.engine.on_observe = lambda seen: drafted.extend(len(one.proposal) for one in seen)
    assert total_variation(engine_distribution(llm, prompt, PARAMS), truth) < CLOSE
    assert llm.engine.stats().num_draft_failures == 0
    assert any(drafted), "nothing was drafted, so nothing was shown"


@pytest.mark.parametrize("spec", [{**DRAFT, **CHAIN}, {**DRAFT, **TREE}])
def test_penalties_along_the_paths_of_a_tree(spec: dict[str, Any], prompt: list[int]) -> None:
    params = dataclasses.replace(
        PARAMS, repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.6, max_tokens=3
    )
    llm = LLM(speculative_config={**spec, "verifier": "rejection"})
    without = engine_distribution(LLM(), prompt, params)
    assert total_variation(engine_distribution(llm, prompt, params), without) < CLOSE


UNDER_GRAMMAR = dataclasses.replace(
    PARAMS, structured={"regex": "((one|two|three) ?){2,9}"}, ignore_eos=False, logit_bias={1: 2.0}
)
"""With forced tokens in some places and a choice in others."""
CONSTRAINED = {
    "ngram": {"method": "ngram", **CHAIN},
    "draft-chain": {**DRAFT, **CHAIN},
    "draft-tree": {**DRAFT, **TREE},
    "draft-greedy": {**DRAFT, **CHAIN, "draft_sample_method": "greedy"},
    "lookahead": {"method": "lookahead"},
}


@pytest.fixture(scope="module")
def truth_under_grammar(prompt: list[int]) -> Distribution:
    distribution = engine_distribution(LLM(), prompt, UNDER_GRAMMAR)
    assert len(distribution) > 4
    return distribution


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("drafter", CONSTRAINED)
def test_the_distribution_under_a_grammar_stays(
    drafter: str, verifier: str, prompt: list[int], truth_under_grammar: Distribution
) -> None:
    llm = LLM(speculative_config={**CONSTRAINED[drafter], "verifier": verifier})
    assert total_variation(engine_distribution(llm, prompt, UNDER_GRAMMAR), truth_under_grammar) < CLOSE


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_drafter_that_says_something_untrue_is_found(
    verifier: str, prompt: list[int], truth: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy guesses that are called samples of the draft's distribution."""
    honest = DraftTree.proposal

    def boast(self: DraftTree) -> Proposal:
        proposal = honest(self)
        if proposal.draft_probs is None:
            return proposal
        best = proposal.draft_probs.argmax(dim=-1).tolist()
        return Proposal.chain(best, ProposalKind.SAMPLED_IID, proposal.draft_probs)

    monkeypatch.setattr(DraftTree, "proposal", boast)
    llm = LLM(speculative_config={**DRAFT, "num_speculative_tokens": 1, "verifier": verifier})
    assert total_variation(engine_distribution(llm, prompt, PARAMS), truth) > 1e-3
