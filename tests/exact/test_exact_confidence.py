"""Drafts that grow by what a confidence head says: ended chains and weighted trees leave every distribution alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from exact_cases import BIASED, EXACT, TARGETS, VERIFIERS

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.draft_trees import DraftTrees
from slipstream.draft.proposers.marginals import grow_tree
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.testing.enumeration import exactness_gap
from slipstream.testing.table_model import TableModel, Text
from slipstream.verify import create_verifier
from slipstream.verify.registry import VERIFIERS as JUDGES

DEPTH = 3
CHAIN = ShapeOptions(
    num_speculative_tokens=DEPTH, confidence_threshold=0.3, draft_sample_method="probabilistic"
)
TREE = ShapeOptions(
    num_speculative_tokens=DEPTH, tree_top_k=2, num_draft_nodes=4, draft_sample_method="greedy"
)


@cache
def logits_after(text: Text, vocab_size: int) -> torch.Tensor:
    return TableModel(vocab_size, seed=91, spread=0.8).log_probs(text)


@cache
def said_after(text: Text) -> float:
    """A confidence, high or low, of what a head may know before a token is drawn: the text before it."""
    number = torch.Generator().manual_seed(1 + sum((token + 1) * 7**n for n, token in enumerate(text)))
    return 0.05 + 0.9 * float(torch.rand((), generator=number))


@dataclass(frozen=True)
class ConfidentDrafter:
    """Grows its drafts as block drafters do: from tables, of which marginals' know the committed text alone."""

    options: ShapeOptions
    vocab_size: int
    marginal: bool = False
    is_sure: bool = False
    """Says 1 of every token."""

    def __call__(self, text: Text, noise: Noise, max_depth: int) -> Proposal:
        shape = ProposalShape.of(self.options, JUDGES.load("rejection").traits())
        sequence = Sequence(0, "0", 0, [*text], len(text), SamplingParams(), seed=0)
        trees = DraftTrees(shape, self.vocab_size, {}, self.options.confidence_threshold)
        tree = trees.begin(sequence, 99)
        tree.noise, tree.max_depth = noise, min(DEPTH, max_depth)
        if not max_depth:
            tree.frontier = []
        if self.marginal:
            levels = [(*text, *[0] * level) for level in range(tree.max_depth)]
            grow_tree(tree, self.logits(levels), [self.said(level) for level in levels])
        while tree.frontier:
            paths = [(*text, *(node.token_ids() if node else [])) for node in tree.frontier]
            tree.grow(self.logits(paths), likely=[self.said(path) for path in paths])
        return tree.proposal()

    def logits(self, texts: list[Text]) -> torch.Tensor:
        return torch.stack([logits_after(text, self.vocab_size) for text in texts])

    def said(self, text: Text) -> float:
        return 1.0 if self.is_sure else said_after(text)


WAYS = {"chain": (CHAIN, False), "tree": (TREE, False), "marginal tree": (TREE, True)}


@pytest.mark.parametrize("target", ["plain", "wide", "top_k", "stop", "combined"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_what_a_head_says_changes_no_distribution(verifier: str, way: str, target: str) -> None:
    options, marginal = WAYS[way]
    drafter = ConfidentDrafter(options, TARGETS[target].model.vocab_size, marginal)
    assert exactness_gap(TARGETS[target], drafter, create_verifier(verifier), 3) < EXACT


@pytest.mark.parametrize("way", WAYS)
def test_what_a_head_says_changes_the_drafts(way: str) -> None:
    """Else the test above would show nothing."""
    options, marginal = WAYS[way]
    differing = 0
    for text in itertools.chain.from_iterable(itertools.product(range(3), repeat=n) for n in range(4)):
        noise = Noise(0, len(text))
        proposals = [
            ConfidentDrafter(options, 3, marginal, is_sure)(text, noise, DEPTH) for is_sure in (False, True)
        ]
        differing += len({(each.token_ids, each.parents) for each in proposals}) > 1
    assert differing > 5


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_chain_that_ends_by_its_own_token_is_found(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was drawn and then withheld, for what it is, no longer comes from the distribution that is said."""

    def late(self: DraftTree, log_probs: torch.Tensor, likely: float | None) -> bool:
        return False

    honest = DraftTree.proposal

    def withheld(self: DraftTree) -> Proposal:
        text = tuple(self.sequence.token_ids)
        kept = itertools.takewhile(
            lambda node: said_after((*text, *node.token_ids())) >= CHAIN.confidence_threshold, self.nodes
        )
        self.nodes = list(kept)
        return honest(self)

    monkeypatch.setattr(DraftTree, "loses_confidence", late)
    monkeypatch.setattr(DraftTree, "proposal", withheld)
    target = TARGETS["plain"]
    assert exactness_gap(target, ConfidentDrafter(CHAIN, 3), create_verifier(verifier), 3) > BIASED
