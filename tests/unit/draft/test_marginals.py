"""Trees from marginals: the best nodes that there are, by the drafter's probabilities or with the target's noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.proposers.draft_tree import DraftTree, NotFiniteError
from slipstream.draft.proposers.draft_trees import DraftTrees
from slipstream.draft.proposers.marginals import grow_from_marginals, grow_tree
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.verify.registry import VERIFIERS

VOCAB, LEVELS, TOP_K, NODES = 30, 4, 5, 14
TEXT = [3, 1, 4, 1, 5]
SHAPE = ShapeOptions(num_speculative_tokens=LEVELS, tree_top_k=TOP_K, num_draft_nodes=NODES)


def new_tree(options: ShapeOptions = SHAPE, budget: int = 99, **params: Any) -> DraftTree:
    given = SamplingParams(**{"temperature": 0.8, "max_tokens": 20} | params)
    sequence = Sequence(7, "7", 0, list(TEXT), 2, given, seed=11)
    shape = ProposalShape.of(options, VERIFIERS.load("coupled").traits())
    return DraftTrees(shape, VOCAB, {}).begin(sequence, budget)


def some_logits(seed: int = 0, levels: int = LEVELS) -> Tensor:
    return torch.randn(levels, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def paths_of(proposal: Proposal) -> set[tuple[int, ...]]:
    return {tuple(proposal.token_ids[step] for step in proposal.path(node)) for node in range(len(proposal))}


def best_paths(scores: Tensor, num_nodes: int, likely: Seq[float] = (1.0,) * LEVELS) -> set[tuple[int, ...]]:
    """By brute force: the best of all paths of the best tokens of each level, weighted with how likely a level is."""
    top = scores.log_softmax(-1).topk(TOP_K)
    found: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(scores) + 1):
        for ranks in itertools.product(range(TOP_K), repeat=depth):
            path = tuple(int(top.indices[level, rank]) for level, rank in enumerate(ranks))
            found[path] = sum(
                float(top.values[level, rank]) + math.log(likely[level]) for level, rank in enumerate(ranks)
            )
    return set(sorted(found, key=lambda path: -found[path])[:num_nodes])


@pytest.mark.parametrize("budget", [3, 9, 99])
@pytest.mark.parametrize("method", ["coupled", "greedy"])
def test_a_tree_has_the_best_nodes_that_there_are(method: str, budget: int) -> None:
    options = ShapeOptions(
        num_speculative_tokens=LEVELS, tree_top_k=TOP_K, num_draft_nodes=NODES, draft_sample_method=method
    )
    for seed in range(5):
        tree, logits = new_tree(options, budget), some_logits(seed, min(LEVELS, budget))
        grow_from_marginals([tree], logits)
        scores = logits.double() / 0.8
        if method == "coupled":
            positions = range(len(TEXT), len(TEXT) + len(logits))
            scores = Noise(11, len(TEXT), greedy=False).perturb(scores.log_softmax(-1), positions)
        assert paths_of(tree.proposal()) == best_paths(scores, min(budget, NODES))


def test_a_tree_of_a_greedy_request_is_ranked_by_the_drafter_s_own_probabilities() -> None:
    tree, logits = new_tree(temperature=0.0), some_logits()
    grow_from_marginals([tree], logits)
    assert paths_of(tree.proposal()) == best_paths(logits, NODES)


@pytest.mark.parametrize("method", ["coupled", "greedy"])
def test_nodes_are_ranked_by_how_likely_their_levels_are_too(method: str) -> None:
    options = replace(SHAPE, draft_sample_method=method)
    moved = 0
    for seed in range(5):
        likely = [0.9, 0.4, 0.7, 0.2]
        tree, logits = new_tree(options), some_logits(seed)
        grow_tree(tree, logits, likely)
        scores = logits.double() / 0.8
        if method == "coupled":
            positions = range(len(TEXT), len(TEXT) + LEVELS)
            scores = Noise(11, len(TEXT), greedy=False).perturb(scores.log_softmax(-1), positions)
        assert paths_of(tree.proposal()) == best_paths(scores, NODES, likely)
        moved += best_paths(scores, NODES, likely) != best_paths(scores, NODES)
    assert moved


@pytest.mark.parametrize("penalty", [0.0, 0.5], ids=["best-first", "level by level"])
def test_levels_without_a_chance_get_no_nodes_and_sure_ones_change_nothing(penalty: float) -> None:
    plain, sure, unlikely, hopeless = (new_tree(presence_penalty=penalty) for _ in range(4))
    grow_tree(plain, some_logits())
    grow_tree(sure, some_logits(), [1.0] * LEVELS)
    grow_tree(unlikely, some_logits(), [1.0, 1e-9, 1.0, 1.0])
    grow_tree(hopeless, some_logits(), [1.0, 0.0, 1.0, 1.0])
    assert sure.proposal() == plain.proposal()
    assert max(plain.proposal().depths) > 1
    assert set(hopeless.proposal().depths) == {1}
    assert len(hopeless.proposal()) == TOP_K == unlikely.proposal().depths.count(1)
    assert len(unlikely.proposal()) == NODES  # a node that is hardly likely costs nothing where there is room


def test_what_is_said_of_a_path_that_ends_is_not_said_of_another() -> None:
    """The request allows none of the tokens that the drafter has below the first node."""
    options = ShapeOptions(num_speculative_tokens=2, tree_top_k=2, draft_sample_method="greedy")
    tree = new_tree(options, allowed_token_ids=[4, 5])
    logits = torch.zeros(2, VOCAB)
    first, _ = tree.grow(logits[:1])
    assert tree.frontier[0] is first
    logits[0, [0, 4, 5]] = -math.inf  # without any token, a row says that the text stops, with token 0
    below = tree.grow(logits, likely=[0.1, 0.8])
    assert [math.exp(node.score) for node in below] == pytest.approx([0.5 * 0.8 * 0.5] * 2)


def test_trees_of_several_depths_take_their_own_levels() -> None:
    logits = some_logits()
    alone = new_tree(budget=2)
    grow_from_marginals([alone], logits[:2])
    shallow, deep = new_tree(budget=2), new_tree()
    grow_from_marginals([shallow, deep], torch.cat([logits[:2], logits]))
    assert shallow.proposal() == alone.proposal()
    assert paths_of(deep.proposal()) > paths_of(shallow.proposal())


def test_where_a_request_penalises_what_was_drafted_the_paths_count() -> None:
    """The same token is the best of every level; a node below it must not have it again."""
    logits = torch.zeros(LEVELS, VOCAB)
    logits[:, 9] = 5.0
    plain, penalised = (
        new_tree(temperature=0.0),
        new_tree(temperature=0.0, presence_penalty=2.0, repetition_penalty=9.0),
    )
    for tree in (plain, penalised):
        grow_from_marginals([tree], logits)
    assert (9, 9) in paths_of(plain.proposal())
    assert (9, 9) not in paths_of(penalised.proposal())


def test_tokens_without_a_chance_are_not_drafted() -> None:
    logits = torch.full((LEVELS, VOCAB), float("-inf"))
    logits[:, 4] = 0.0
    tree = new_tree()
    grow_from_marginals([tree], logits)
    assert paths_of(tree.proposal()) == {(4,) * depth for depth in range(1, LEVELS + 1)}


def test_numbers_that_are_not_finite_are_an_error() -> None:
    logits = some_logits()
    logits[1, 0] = float("nan")
    with pytest.raises(NotFiniteError):
        grow_from_marginals([new_tree()], logits)
