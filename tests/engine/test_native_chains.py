"""Chains that the kernels draw in one call are those that are grown level by level, filters and confidence included."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.models.executor.chains import Chains
from tests.kit.block_heads import block_head
from tests.kit.engines import MakeLLM
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 5}
SPECS: dict[str, dict[str, Any]] = {
    "draft": DRAFT,
    "confident draft": {**DRAFT, "confidence_threshold": 0.15},
    "confident, greedy": {**DRAFT, "confidence_threshold": 0.15, "draft_sample_method": "greedy"},
    "layers": {"method": "layer_skip", "exit_layer": 5, "confidence_threshold": 0.1},
    "eagle3": {
        "method": "eagle3",
        "model": EMBEDDED_EAGLE3,
        "tree_top_k": 1,
        "num_draft_nodes": None,
        "confidence_threshold": 0.05,
    },
    "dflash": {"method": "dflash", "model": "mask"},
    "confident dflash": {"method": "dflash", "model": "anchor", "confidence_threshold": 0.0005},
    "dflash, left to right": {"method": "dflash", "model": "rnn", "confidence_threshold": 0.0005},
    "pruned dflash": {"method": "dflash", "model": "pruned"},
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02, seed=3, max_tokens=24, ignore_eos=True),
]


@pytest.mark.parametrize("name", SPECS)
def test_a_chain_in_one_call_is_that_of_its_levels(
    name: str, make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    tokens, level = Chains.take_struct, Chains.take_level

    def counted(self: Chains) -> list[list[int]]:
        chains = tokens(self)
        drawn.extend(map(len, chains))
        return chains

    spec = SPECS[name]

    def counted_level(self: Chains, growing: list[int]) -> list[int]:
        drawn.extend(growing)
        return level(self, growing)

    llm = make_llm({**spec, "model": block_head(spec["model"])} if spec["method"] == "dflash" else spec)

    def run() -> tuple[list[list[int]], list[list[tuple[int, ...]]]]:
        llm.reset_caches()
        proposals: dict[int, list[tuple[int, ...]]] = {}
        llm.engine.on_observe = lambda items: [
            proposals.setdefault(item.sequence.id, []).append(item.proposal.token_ids) for item in items
        ]
        outputs = llm.generate(prompts[: len(PARAMS)], PARAMS)
        return [output.outputs[0].token_ids for output in outputs], list(proposals.values())

    monkeypatch.setattr(Chains, "take_struct", counted)
    monkeypatch.setattr(Chains, "take_level", counted_level)
    texts, chains = run()
    assert len(drawn) > 10
    if "confidence_threshold" in SPECS[name]:
        assert len({len(chain) for one in chains for chain in one}) > 2, "some chains end early"
    drawn.clear()
    monkeypatch.setattr(DraftTree, "draw", lambda self: None)
    assert run() == (texts, chains)
    assert not drawn
