"""Trees that grow on a device: the host reads neither their tokens nor their parents before the target has checked
them.

Every level has a fixed number of nodes, so that the host knows all shapes: the best of the tokens below the nodes of
the level before, by the product of the probabilities on their paths (`models.executor.levels`). `DraftTree` chooses its
nodes among all levels. A tree with a smaller budget is the first nodes of a whole one, so that all grow together.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.core.proposal import ProposalKind
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.kv.slots import SlotMap
from slipstream.kv.upload import across, upload
from slipstream.models.cuda.filters import filter_numbers, filters_of
from slipstream.models.executor.levels import Levels, TreesShape
from slipstream.models.rows import RowGroup


def level_widths(num_nodes: int, depth: int, top_k: int) -> tuple[int, ...]:
    """Nodes of each level: `num_nodes` in all, as evenly as the levels have room. Below each of the best `top_k` nodes
    of a level so many tokens are looked at."""
    widths: list[int] = []
    above = 1
    for level in range(depth):
        left = num_nodes - sum(widths)
        if left <= 0:
            break
        widths.append(min(above * top_k, -(-left // (depth - level))))
        above = min(top_k, widths[-1])
    return tuple(widths)


def tree_shape(shape: ProposalShape, vocab_size: int, depth: int, filters: bool = False) -> TreesShape:
    """Of trees with this shape that are no deeper than `depth`."""
    top_k = min(shape.top_k, vocab_size)
    widths = level_widths(shape.num_nodes, shape.depth, top_k)[:depth]
    return TreesShape(widths, top_k, vocab_size, shape.method == "coupled", filters)


def grows_on_device(tree: DraftTree) -> bool:
    """Whether nothing but the logits, a temperature and filters decides about the tree's tokens."""
    known = tree.processor.filters_only is not None and tree.shape.method in ("greedy", "coupled")
    return known and tree.shape.is_dynamic


class DeviceTrees:
    """Grows trees of the same shape together, from the logits behind their texts to their proposals."""

    def __init__(
        self, trees: Seq[DraftTree], vocab_size: int, firsts: Seq[tuple[SlotMap, int]] = (),
        onto: torch.device | None = None,
    ) -> None:  # fmt: skip
        """`firsts` are each sequence's slots and how many of its entries lie before the tree's; without them the trees
        have no rows. Tokens from id `vocab_size` on are never drafted. The proposals lie on the device `onto`, None:
        where they grew."""
        self._trees, self._firsts, self._vocab_size, self._onto = trees, firsts, vocab_size, onto
        params = (tree.processor.filters_only for tree in trees)
        self._params = [each for each in params if each is not None]

    @cached_property
    def shape(self) -> TreesShape:
        """See `levels.PendingDrafts`, as for `numbers` and `rows`."""
        has_filters = any(each.filters for each in self._params)
        depth = max(tree.max_depth for tree in self._trees)
        return tree_shape(self._trees[0].shape, self._vocab_size, depth, has_filters)

    def draw(self, logits: Tensor, run: Callable[[list[RowGroup]], Tensor]) -> None:
        """Grow the trees from `logits` [trees, vocab], and have each take its proposal. `run` computes a level."""
        levels = self.shape.levels(upload(self.numbers(), logits.device))
        levels.take(logits)
        for level in range(1, len(self.shape.widths)):
            levels.take(run(self._pending_rows(level, levels)))
        self.finish(levels.drawn())

    def fill_in(self, numbers: Tensor) -> None:
        """The host knows all of them."""

    def numbers(self) -> NDArray[np.int64]:
        """[5 + levels, trees]: the bits of the temperatures as float64, who draws with noise, filters, noise's keys."""
        depth = len(self.shape.widths)
        numbers = np.zeros((self.shape.num_numbers, len(self._trees)), np.int64)
        numbers[0] = np.array([params.temperature for params in self._params], np.float64).view(np.int64)
        filters = [filters_of(each.top_k, each.top_p, each.min_p) for each in self._params]
        numbers[2:5] = filter_numbers(filters)
        for number, tree in enumerate(self._trees):
            numbers[1, number] = self.shape.coupled and not tree.noise.greedy
            if numbers[1, number]:
                first = len(tree.sequence.token_ids)
                numbers[5:, number] = [tree.noise.signed_key(first + level) for level in range(depth)]
        return numbers

    def rows(self, level: int, scratch: range) -> list[RowGroup]:
        """The rows of the best nodes of the level before, whose entries lie behind those of the levels above."""
        fed = self.shape.fed
        width, begins = fed[level - 1], list(accumulate(fed[: level - 1], initial=0))
        return [
            RowGroup(
                slots,
                past,
                range(-1 - number * width, -1 - (number + 1) * width, -1),
                range(width),
                positions=[past + level - 1] * width,
                stored_positions=[
                    past + depth for depth, count in enumerate(fed[: level - 1]) for _ in range(count)
                ],
                tail_seen=[begins] * width,
                owner=self._trees[number].sequence.id,
            )
            for number, (slots, past) in enumerate(self._firsts)
        ]

    def _pending_rows(self, level: int, levels: Levels) -> list[RowGroup]:
        """`rows` with the tokens and paths of `levels`."""
        assert levels.ranks is not None
        number = len(self._trees)
        tokens, ranks = levels.tokens.view(number, -1), levels.ranks.view(number, -1)
        return [
            replace(group, drafted=PendingNumbers(own), ranks=paths)
            for group, own, paths in zip(self.rows(level, range(0)), tokens, ranks, strict=True)
        ]

    def finish(self, drawn: Tensor) -> None:
        """Have each tree take its proposal, from what `TreeLevels` has drawn."""
        widths, drawn = self.shape.widths, across(drawn, self._onto)
        kind = ProposalKind.COUPLED if self._trees[0].shape.method == "coupled" else ProposalKind.ONE_HOT
        for tree, numbers in zip(self._trees, drawn, strict=False):  # behind them may stand others
            tokens, parents, ranks = numbers.tensor_split([sum(widths), 2 * sum(widths)])
            own = _within(widths[: tree.max_depth], tree.max_nodes)
            num_nodes, num_ranks = sum(own), sum(depth * width for depth, width in enumerate(own, 1))
            pending = PendingNumbers(tokens[:num_nodes]), PendingNumbers(parents[:num_nodes])
            tree.take_pending(PendingTree(*pending, kind, None, own, ranks[:num_ranks]), self.shape.fed)


def _within(widths: tuple[int, ...], num_nodes: int) -> tuple[int, ...]:
    """The levels of the first `num_nodes` nodes."""
    begins = accumulate(widths[:-1], initial=0)
    return tuple(
        min(width, num_nodes - begin)
        for width, begin in zip(widths, begins, strict=True)
        if begin < num_nodes
    )
