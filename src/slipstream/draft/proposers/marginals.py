"""Proposals from marginals: at a depth, the probabilities below every node are the same, given the committed text.

What is drawn from them is drawn with the noise of its own position, and the marginal itself is its distribution.
A tree need not grow level by level then: its nodes are found in the order of the products of their probabilities, as
in JetSpec (2026, arXiv 2606.18394).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.draft.proposers.draft_tree import (
    DraftNode,
    DraftTree,
    NotFiniteError,
    log_weights,
    whole_chains,
)
from slipstream.models.executor.chains import Chains


def grow_from_marginals(trees: Seq[DraftTree], logits: Tensor) -> None:
    """Grow `trees` to the end from `logits` [sum of their `max_depth`, vocab], those of a tree's levels in order.

    Raises as `DraftTree.grow` does.
    """
    firsts = list(accumulate((tree.max_depth for tree in trees), initial=0))[:-1]

    def draw(chains: Chains, own: Seq[int]) -> list[list[int]]:
        return chains.draw_levels(lambda rows: logits[rows], own)

    take_chains(trees, firsts, logits.shape[-1], draw)
    for tree, first in zip(trees, firsts, strict=True):
        grow_tree(tree, logits[first : first + tree.max_depth])


def take_chains(
    trees: Seq[DraftTree],
    firsts: Seq[int],
    vocab_size: int,
    draw: Callable[[Chains, Seq[int]], list[list[int]]],
) -> None:
    """Draw the chains that one call can draw from end to end; the other trees stay as they are.

    `firsts` numbers the first row of each tree's logits. `draw` is given those of the chains, as `Chains.draw_levels`.
    """
    draws = whole_chains(trees)
    drawn = [(tree, first) for tree, first in zip(trees, firsts, strict=True) if tree.sequence.id in draws]
    if drawn:
        found = draw(Chains(list(draws.values()), vocab_size), [first for _, first in drawn])
        for (tree, _), token_ids in zip(drawn, found, strict=True):
            tree.take_chain(token_ids)


def grow_tree(tree: DraftTree, logits: Tensor, likely: Seq[float] | None = None) -> None:
    """Grow one tree to the end from the `logits` [levels, vocab] of its levels; unchanged where it has no frontier.

    `likely` is as for `DraftTree.grow`, one for each level. A dynamic tree gets the best nodes that it may have, unless
    what its request does to logits depends on the path, as penalties and grammars do: then it grows level by level.
    Raises as `DraftTree.grow` does.
    """
    if tree.frontier and tree.shape.is_dynamic and tree.processor.filters_only is not None:
        _grow_best_first(tree, *_candidates(tree, logits, likely))
    for depth, level in enumerate(logits):
        width = len(tree.frontier)
        if not width:
            return
        tree.grow(level.expand(width, -1), likely=None if likely is None else [likely[depth]] * width)


def _candidates(
    tree: DraftTree, logits: Tensor, likely: Seq[float] | None
) -> tuple[list[list[int]], list[list[float]]]:
    """The best tokens of each level, and the logarithms of their weighted probabilities; with `coupled`, after adding
    the target's noise."""
    if not logits.amax(-1).isfinite().all():
        raise NotFiniteError(tree.sequence.id)
    log_probs = tree.processor.log_probs(logits, [], [[]] * len(logits))
    log_probs = log_probs.masked_fill(logits == -math.inf, -math.inf)
    if tree.shape.method == "coupled":
        first = len(tree.sequence.token_ids)
        noisy = tree.noise.perturb(log_probs, range(first, first + len(logits)))
        log_probs = torch.log_softmax(noisy, dim=-1)
    top = log_probs.topk(min(tree.shape.top_k, log_probs.shape[-1]), dim=-1)
    weights = [0.0] * len(logits) if likely is None else log_weights(likely)
    levels = zip(top.values.tolist(), weights, strict=True)
    return top.indices.tolist(), [[score + weight for score in scores] for scores, weight in levels]


def _grow_best_first(tree: DraftTree, token_ids: list[list[int]], scores: list[list[float]]) -> None:
    """Add the best nodes, each behind its parent and its better siblings, none of which it can exceed."""
    waiting: list[tuple[float, int, int, DraftNode | None, int]] = []  # -score, order, depth, parent, rank

    def wait(depth: int, parent: DraftNode | None, rank: int) -> None:
        if depth <= len(scores) and rank < len(scores[depth - 1]):
            score = (parent.score if parent else 0.0) + scores[depth - 1][rank]
            if score > -math.inf:
                heapq.heappush(waiting, (-score, len(tree.nodes) + len(waiting), depth, parent, rank))

    wait(1, None, 0)
    while waiting and len(tree.nodes) < tree.max_nodes:
        score, _, depth, parent, rank = heapq.heappop(waiting)
        node = DraftNode(token_ids[depth - 1][rank], parent, depth, -score)
        tree.nodes.append(node)
        wait(depth + 1, node, 0)
        wait(depth, parent, rank + 1)
    tree.frontier = []
