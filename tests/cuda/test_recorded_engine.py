"""The whole engine over recorded passes, on a CPU: the same texts, everything replayed, one wait a step."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.core.pending import PendingNumbers
from slipstream.models.executor import cuda_graph, recorded_drafts
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.levels import NOT_FINITE
from slipstream.models.executor.recording import RecordedPass
from slipstream.testing.recorded_graph import RecordedExecutor
from tests.kit.recorded_engines import PARAMS, RECORDED, answers, check_waits, expected

CHAIN = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
TREE = {**CHAIN, "tree_top_k": 3}
SPECS: dict[str, Any] = {
    "off": None,
    "ngram": {"method": "ngram"},
    "chain": CHAIN,
    "tree": TREE,
    "wide-tree": {**CHAIN, "num_speculative_tokens": 3, "tree_top_k": 2, "num_draft_nodes": 9},
    "fixed-tree": {
        "method": "draft_model",
        "model": EMBEDDED_DRAFT,
        "tree_choices": [[0], [1], [0, 0], [0, 1]],
    },
    "confident": {**CHAIN, "confidence_threshold": 0.4},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    "eagle3-chain": {"method": "eagle3", "model": EMBEDDED_EAGLE3, "tree_top_k": 1, "num_draft_nodes": None},
}


@lru_cache(maxsize=1)  # what is recorded keeps every number in between
def recorded(spec: str) -> LLM:
    return LLM(speculative_config=SPECS[spec], **RECORDED)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [*(("tree", kind) for kind in PARAMS), *((spec, "mixed") for spec in sorted(SPECS, key="tree".__ne__))],
)
def test_the_texts_are_those_of_passes_that_are_not_recorded(spec: str, kind: str) -> None:
    llm = recorded(spec)
    executor = llm.engine.model.executor
    assert isinstance(executor, CudaGraphExecutor)
    replayed, eager = executor.num_replayed, executor.eager.total()
    assert answers(llm, kind) == expected(kind)
    assert executor.num_replayed > replayed
    assert executor.eager.total() == eager
    draft = llm.engine.draft_model
    if spec in ("chain", "tree", "wide-tree"):
        assert draft is not None
        assert isinstance(draft.executor, CudaGraphExecutor)
        assert kind == "penalised" or draft.executor.drafts.num_replayed
        assert not draft.executor.drafts.refused


@pytest.mark.parametrize("spec", ["tree", "eagle3"])
def test_passes_of_all_sizes_are_recorded_at_load_the_largest_first(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    drafts: list[int] = []

    class Listed(RecordedPass):
        def __init__(self, graph: Any, size: int, *others: Any) -> None:
            sizes.append(size)
            super().__init__(graph, size, *others)

    monkeypatch.setattr(RecordedExecutor, "warms_up", True)

    class ListedDrafts(RecordedPass):
        def __init__(self, graph: Any, size: int, *others: Any) -> None:
            drafts.append(size)
            super().__init__(graph, size, *others)

    monkeypatch.setattr(cuda_graph, "RecordedPass", Listed)
    monkeypatch.setattr(recorded_drafts, "RecordedPass", ListedDrafts)
    options = RECORDED | {"max_num_batched_tokens": 60, "max_num_seqs": 4}
    llm = LLM(speculative_config=SPECS[spec], **options)
    assert len(sizes) == (3 if spec == "eagle3" else 6), "64, 32 and 16 rows of draft and target"
    assert sizes[:3] == sorted(sizes[:3], reverse=True)
    assert sizes[3:] == sorted(sizes[3:], reverse=True)
    assert len(drafts) == 3, "drafts of 4, 2 and 1 requests"
    assert drafts == sorted(drafts, reverse=True)
    assert answers(llm, "greedy", 3) == expected("greedy")[:3]


@pytest.mark.parametrize(
    ("spec", "kind", "number"),
    [
        ("off", "seeded", 3),
        ("chain", "greedy", 1),
        ("chain", "filtered", 3),
        ("tree", "greedy", 3),
        ("tree", "seeded", 3),
        ("tree", "filtered", 1),
    ],
)
def test_a_step_waits_once(spec: str, kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The numbers of the target's pass, those of all drafts, and what each sequence moves in the draft model's cache.
    most = 1 + (spec != "off") + (number if spec in ("chain", "tree") else 0)
    check_waits(recorded(spec), kind, number, monkeypatch, most)


@pytest.mark.parametrize("spec", ["chain", "tree"])
def test_a_draft_that_is_not_finite_is_found_once_it_was_checked(spec: str) -> None:
    llm = LLM(speculative_config=SPECS[spec], **RECORDED)
    wanted = answers(llm, "greedy", 2)
    assert llm.engine.stats().num_draft_failures == 0
    model = llm.engine.draft_model
    assert model is not None
    row = model.model.get_input_embeddings().weight[wanted[0][6]]
    with torch.no_grad():
        kept = row.clone()
        row.fill_(math.nan)
        try:
            assert answers(llm, "greedy", 2) == wanted
        finally:
            row.copy_(kept)  # models of one file share their weights
    assert llm.engine.stats().num_draft_failures >= 1


@pytest.mark.parametrize("spec", ["chain", "eagle3-chain"])
def test_whoever_drafts_what_is_not_finite_is_retired(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads keep no entries of accepted tokens, and are told of them all the same."""
    pending = Chains.pending

    def damaged(self: Chains, drawn: torch.Tensor) -> list[PendingNumbers]:
        return pending(self, torch.full_like(drawn, NOT_FINITE))

    monkeypatch.setattr(Chains, "pending", damaged)
    llm = LLM(speculative_config=SPECS[spec], **RECORDED)
    assert answers(llm, "greedy", 2) == expected("greedy")[:2]
    assert llm.engine.stats().num_draft_failures >= 1
