"""Heads whose drafts are recorded: the drafts of the host's own drawing, and one wait a step of an engine."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_EAGLE3
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.levels import NOT_FINITE, ChainLevels, TreeLevels
from slipstream.models.executor.recorded_drafts import FirstStates
from slipstream.models.rows import RowGroup
from tests.kit.head_drafters import random_heads
from tests.kit.kept_trees import KeptTree, grow_by_paths
from tests.kit.mtp_targets import mtp_target, random_mtp
from tests.kit.pard_models import pard_folder
from tests.kit.peagle_heads import masked_eagle3
from tests.kit.recorded_engines import RECORDED, answers, check_waits, expected

CHAIN = {"tree_top_k": 1, "num_draft_nodes": None}
TREE = {"tree_top_k": 3, "num_draft_nodes": None}
METHODS = ("eagle3", "medusa", "hydra", "mtp", "peagle", "pard")
KINDS = {"eagle3": ("greedy", "filtered"), "mtp": ("greedy", "filtered")} | {
    **dict.fromkeys(("medusa", "pard"), ("filtered",)),
    **dict.fromkeys(("hydra", "peagle"), ("greedy",)),
}
"""Of each method which texts' drafts are compared."""
OWN = RECORDED | {"enable_prefix_caching": False}  # each answer begins anew
SHAPES: dict[str, Any] = {"chain": CHAIN, "tree": TREE}


def spec_of(method: str, shape: str) -> dict[str, Any]:
    models = {"eagle3": lambda: EMBEDDED_EAGLE3, "mtp": str, "peagle": masked_eagle3, "pard": pard_folder}
    model = models.get(method, lambda: random_heads(method))()
    return {"method": method, "model": model, **SHAPES[shape], "num_speculative_tokens": 3}


def target(method: str) -> str | None:
    return mtp_target("llama").folder if method == "mtp" else None


def length_of(method: str) -> dict[str, Any]:
    """A tiny target has its own."""
    return {"max_model_len": None} if method == "mtp" else {}


@lru_cache(maxsize=1)  # what is recorded keeps every number in between
def recorded(method: str, shape: str) -> LLM:
    return LLM(target(method), speculative_config=spec_of(method, shape), **OWN | length_of(method))


def drafts_of(llm: LLM, kind: str, number: int) -> list[Any]:
    """What was proposed, step after step."""
    found: list[Any] = []
    llm.engine.on_observe = lambda seen: found.extend(
        (one.sequence.num_prompt_tokens, one.proposal.token_ids, one.proposal.parents) for one in seen
    )
    answers(llm, kind, number)
    llm.engine.on_observe = None
    return found


@pytest.mark.parametrize("method", METHODS)
def test_recorded_chains_are_those_that_the_host_draws(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step waits once."""
    llm = recorded(method, "chain")
    own = {"executor": "eager", "attention_backend": "packed"}
    host = LLM(target(method), speculative_config=spec_of(method, "chain"), **OWN | length_of(method) | own)
    found: list[Any] = []
    for kind in KINDS[method]:
        found += (drafted := drafts_of(llm, kind, 2))
        assert drafted == drafts_of(host, kind, 2)
    assert sum(len(tokens) for _, tokens, _ in found) > 20
    assert check_waits(llm, "seeded", 2, monkeypatch, 2) == expected("seeded", target(method))[:2]
    check_recorded(llm)


def check_recorded(llm: LLM) -> None:
    drafter: Any = llm.engine.drafter
    executor = drafter.executor if llm.engine.draft_model is None else drafter.model.executor
    drafts = executor.drafts
    assert drafts.num_replayed
    assert not drafts.refused


@pytest.mark.parametrize("method", [method for method in METHODS if method != "peagle"])
def test_a_step_with_a_tree_of_a_head_waits_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = recorded(method, "tree")
    number = 8 if method == "mtp" else 2
    found = check_waits(llm, "seeded", number, monkeypatch, 2)
    assert found[:2] == expected("seeded", target(method))[:2]
    if method == "eagle3":
        monkeypatch.undo()
        check_waits(llm, "greedy", 1, monkeypatch, 2)
        assert answers(llm, "mixed") == expected("mixed")
    check_recorded(llm)


@pytest.mark.parametrize(("method", "shape"), [("medusa", "chain"), ("pard", "tree")])
def test_a_head_whose_drafts_are_not_finite_is_retired(
    method: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: TreeLevels) -> torch.Tensor:
        self._is_finite = torch.zeros_like(self._is_finite)
        return drawn(self)

    drawn = TreeLevels.drawn
    monkeypatch.setattr(TreeLevels, "drawn", damaged)
    monkeypatch.setattr(
        ChainLevels, "drawn", lambda self: torch.full_like(torch.stack(self._drawn), NOT_FINITE)
    )
    llm = LLM(target(method), speculative_config=spec_of(method, shape), **OWN | length_of(method))
    assert answers(llm, "greedy", 2) == expected("greedy", target(method))[:2]
    assert llm.engine.stats().num_draft_failures >= 1


def test_masked_drafts_do_not_run_ahead_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of their accepted tokens are masks' until these are fed."""
    llm = recorded("pard", "chain")
    drafter: Any = llm.engine.drafter
    propose, found = drafter.propose, []

    def watched(sequences: Any, budgets: Any) -> Any:
        proposals = propose(sequences, budgets)
        found.extend(drafter.runs_ahead(sequence) for sequence in sequences)
        return proposals

    monkeypatch.setattr(drafter, "propose", watched)
    answers(llm, "greedy", 2)
    assert found
    assert not any(found)


def test_several_prediction_layers_draw_a_pass_a_level_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = mtp_target("llama").folder
    spec = {"method": "mtp", "model": random_mtp(folder, 2), "num_speculative_tokens": 3}
    host = {"executor": "eager", "attention_backend": "packed"}
    ours, theirs = (
        LLM(folder, speculative_config=spec, **OWN | length_of("mtp") | own) for own in ({}, host)
    )
    assert drafts_of(ours, "filtered", 2) == drafts_of(theirs, "filtered", 2)
    check_waits(ours, "seeded", 2, monkeypatch, 30)
    assert ours.engine.stats().num_draft_failures == 0


def features_of(drafter: Any, generator: torch.Generator) -> torch.Tensor:
    """What a target might have kept of 64 tokens."""
    width = drafter.target_cache.feature_width
    return torch.randn(64, width, generator=generator)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_recorded_tree_of_a_head_with_entries_is_that_of_its_paths(method: str, kind: str) -> None:
    drafter: Any = recorded(method, "tree").engine.drafter
    head, rng = drafter.executor, random.Random(f"{method} {kind}")
    features = features_of(drafter, torch.Generator().manual_seed(rng.randrange(100)))
    shapes, vocab_size = drafter.cache.pool, head.target.vocab_size
    layers = [
        LayerShape(len(key), key.shape[-1], value.shape[-1])
        for key, value in zip(shapes.keys, shapes.values, strict=True)
    ]
    pool = KVPool(layers, 128, torch.float32, torch.device("cpu"), num_scratch=8)
    texts = [[rng.randrange(5, vocab_size) for _ in range(length)] for length in (9, 5)]
    slots, begins = [range(0, 64), range(64, 128)], [10, 40]
    states: list[torch.Tensor] = []
    rows, places = [], []
    for own, text, begin in zip(slots, texts, begins, strict=True):
        past = len(text) - 2
        before = ForwardBatch([RowGroup(own, 0, text[:past], [0])])
        head.forward(before, pool, features[begin : begin + past], 0)
        rows.append(RowGroup(own, past, text[past:], [1]))
        places += [begin + past, begin + past + 1]
    trees: list[Any] = [KeptTree(rng, text, (9, 3, 3), kind) for text in texts]
    firsts = [(own, len(text)) for own, text in zip(slots, texts, strict=True)]
    grower = DeviceTrees(trees, vocab_size, firsts)
    for _ in range(2):  # recorded, then replayed with the same numbers
        drawn = head.draft(ForwardBatch(rows), pool, grower, FirstStates(lambda at: features[at], places))
        assert drawn is not None
        grower.finish(drawn)
    found = [tree.grown for tree in trees]
    made, logits = head.forward(ForwardBatch(rows), pool, features[places], 0)
    states = [made[1], made[3]]

    def logits_after(number: int, path: list[int]) -> torch.Tensor:
        state, own = states[number], logits[number]
        for depth, token_id in enumerate(path):
            row = RowGroup(slots[number], len(texts[number]) + depth, [token_id], [0])
            after, below = head.forward(ForwardBatch([row]), pool, state[None], depth + 1)
            state, own = after[0], below[0]
        return own

    grow_by_paths(trees, vocab_size, logits_after)
    assert found == [tree.grown for tree in trees]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_a_recorded_tree_of_heads_is_that_of_its_paths(method: str, kind: str) -> None:
    drafter: Any = recorded(method, "tree").engine.drafter
    heads, rng = drafter.executor, random.Random(f"{method} {kind}")
    features = features_of(drafter, torch.Generator().manual_seed(rng.randrange(100)))
    texts = [[rng.randrange(5, 400) for _ in range(4)] for _ in range(3)]
    trees: list[Any] = [KeptTree(rng, text, (9, 3, 3), kind) for text in texts]
    grower, last = DeviceTrees(trees, heads.target.vocab_size), [text[-1] for text in texts]
    pool = KVPool([LayerShape(1, 8, 8)], 8, torch.float32, torch.device("cpu"))
    drawn = heads.draft(pool, grower, FirstStates(lambda at: features[at], [7, 3, 30]), last)
    assert drawn is not None
    grower.finish(drawn)
    found = [tree.grown for tree in trees]

    def logits_after(number: int, path: list[int]) -> torch.Tensor:
        state = features[[7, 3, 30][number]]
        if method == "hydra":
            tokens = torch.tensor([last[number], *path])
            state = torch.cat([state, *heads.target.embed(tokens)])
        own: torch.Tensor = heads.forward(state[None], len(path), 1)[0, 0]
        return own

    grow_by_paths(trees, heads.target.vocab_size, logits_after)
    assert found == [tree.grown for tree in trees]
