"""Trees that grow on a device: the host reads neither their tokens nor their parents before the target has checked
them.

Every level has a fixed number of nodes, so that the host knows all shapes: the best of the tokens below the nodes of
the level before, by the product of the probabilities on their paths. `DraftTree` chooses its nodes among all levels. A
tree with a smaller budget is the first nodes of a whole one, so that all grow together.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.core.proposal import ROOT, ProposalKind
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.kv.slots import SlotMap
from slipstream.kv.upload import upload
from slipstream.models.batch import RowGroup
from slipstream.models.cuda.filters import filter_numbers, filtered, filters_of, limits
from slipstream.models.executor.chains import NOT_FINITE
from slipstream.sampling.noise import gumbel_of_bits, token_counters, uniform_bits


@dataclass(slots=True)
class Level:
    """Nodes of one depth of all trees, the best first."""

    token_ids: Tensor
    """int64 [trees, width]"""
    parents: Tensor
    """int64 [trees, width]: ranks in the level before."""
    scores: Tensor
    """[trees, width]: log of the product of the probabilities on the path."""
    paths: Tensor
    """int64 [trees, width, depth]: the ranks of the nodes on the path, the node's own last."""


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


def grows_on_device(tree: DraftTree) -> bool:
    """Whether nothing but the logits, a temperature and filters decides about the tree's tokens."""
    known = tree.processor.filters_only is not None and tree.shape.method in ("greedy", "coupled")
    return known and tree.shape.is_dynamic


class DeviceTrees:
    """Grows trees of the same shape together, from the logits behind their texts to their proposals."""

    def __init__(self, trees: Seq[DraftTree], firsts: Seq[tuple[SlotMap, int]], vocab_size: int) -> None:
        """`firsts` are each sequence's slots and how many of its entries lie before the tree's. Tokens from id
        `vocab_size` on are never drafted."""
        self._trees, self._firsts, self._vocab_size = trees, firsts, vocab_size
        shape = trees[0].shape
        self._top_k = min(shape.top_k, vocab_size)
        self._is_coupled = shape.method == "coupled" and not all(tree.noise.greedy for tree in trees)
        depth = max(tree.max_depth for tree in trees)
        self.widths = level_widths(shape.num_nodes, shape.depth, self._top_k)[:depth]
        self._fed = [min(self._top_k, width) for width in self.widths[:-1]]
        """Nodes of each level but the last that are fed."""
        self._levels: list[Level] = []
        params = (tree.processor.filters_only for tree in trees)
        self._params = [each for each in params if each is not None]
        self._has_filters = any(each.filters for each in self._params)

    def draw(self, logits: Tensor, run: Callable[[list[RowGroup]], Tensor]) -> None:
        """Grow the trees from `logits` [trees, vocab], and have each take its proposal. `run` computes a level."""
        device = logits.device
        numbers = upload(self._numbers(), device)
        self._temperatures = numbers[0].view(torch.float64).float()
        self._is_noisy, self._limits, self._keys = numbers[1] > 0, numbers[2:5], numbers[5:]
        self._is_finite = torch.ones(len(self._trees), dtype=torch.bool, device=device)
        for level in range(len(self.widths)):
            if level:
                logits = run(self._rows(level))
            self._grow(level, logits[:, : self._vocab_size])
        self._finish()

    def _numbers(self) -> NDArray[np.int64]:
        """[5 + levels, trees]: the bits of the temperatures as float64, who draws with noise, filters, noise's keys."""
        numbers = np.zeros((5 + len(self.widths), len(self._trees)), np.int64)
        numbers[0] = np.array([params.temperature for params in self._params], np.float64).view(np.int64)
        filters = [filters_of(each.top_k, each.top_p, each.min_p) for each in self._params]
        numbers[2:5] = filter_numbers(filters)
        for number, tree in enumerate(self._trees):
            numbers[1, number] = self._is_coupled and not tree.noise.greedy
            if numbers[1, number]:
                first = len(tree.sequence.token_ids)
                numbers[5:, number] = [
                    tree.noise.signed_key(first + level) for level in range(len(self.widths))
                ]
        return numbers

    def _grow(self, level: int, logits: Tensor) -> None:
        """The nodes of a level, from `logits` [trees * nodes above, vocab]."""
        trees, width = len(self._trees), self.widths[level]
        above = self._fed[level - 1] if level else 1
        self._is_finite &= logits.amax(-1).isfinite().view(trees, above).all(1)
        if self._has_filters:  # of a row that needs more than they look at, the tokens that they look at
            own = [part.repeat_interleave(above) for part in (self._temperatures, *limits(self._limits))]
            logits, _ = filtered(logits, *own)
        log_probs = self._log_probs(level, logits.float().view(trees, above, -1))
        best_below = log_probs.topk(self._top_k, dim=-1)  # [trees, above, top_k]
        scores = best_below.values
        if level:
            scores = scores + self._levels[-1].scores[:, :above, None]
        best = scores.flatten(1).topk(width)
        parents = best.indices // self._top_k
        token_ids = best_below.indices.flatten(1).gather(1, best.indices)
        paths = torch.arange(width, device=logits.device).expand(trees, width)[:, :, None]
        if level:
            before = self._levels[-1].paths.gather(1, parents[:, :, None].expand(-1, -1, level))
            paths = torch.cat([before, paths], dim=-1)
        self._levels.append(Level(token_ids, parents, best.values, paths))

    def _log_probs(self, level: int, logits: Tensor) -> Tensor:
        """[trees, above, vocab], with the target's noise for those that are drawn with it."""
        log_probs = (logits / self._temperatures[:, None, None]).log_softmax(-1)
        if not self._is_coupled:
            return log_probs
        counters = token_counters(logits.shape[-1], logits.device)
        noise = gumbel_of_bits(uniform_bits(self._keys[level][:, None] + counters))  # [trees, vocab]
        drawn = (log_probs.double() + noise[:, None]).log_softmax(-1)
        return torch.where(self._is_noisy[:, None, None], drawn, log_probs.double())

    def _rows(self, level: int) -> list[RowGroup]:
        """The rows of the best nodes of the level before, whose entries lie behind those of the levels above."""
        last, width = self._levels[-1], self._fed[level - 1]
        begins = list(accumulate(self._fed[: level - 1], initial=0))
        groups = []
        for number, (slots, past) in enumerate(self._firsts):
            stored = [past + depth for depth, fed in enumerate(self._fed[: level - 1]) for _ in range(fed)]
            groups.append(
                RowGroup(
                    slots,
                    past,
                    [0] * width,
                    range(width),
                    positions=[past + level - 1] * width,
                    stored_positions=stored,
                    tail_seen=[begins] * width,
                    drafted=PendingNumbers(last.token_ids[number, :width]),
                    ranks=last.paths[number, :width].flatten(),
                )
            )
        return groups

    def _finish(self) -> None:
        levels = self._levels
        tokens = torch.cat([level.token_ids for level in levels], dim=1)
        tokens = torch.where(self._is_finite[:, None], tokens, NOT_FINITE)
        begins = list(accumulate(self.widths[:-2], initial=0))
        parents = [torch.full_like(levels[0].parents, ROOT)]
        parents += [level.parents + begin for level, begin in zip(levels[1:], begins, strict=False)]
        parents_of_all = torch.cat(parents, dim=1)
        ranks = torch.cat([level.paths.flatten(1) for level in levels], dim=1)
        kind = ProposalKind.COUPLED if self._trees[0].shape.method == "coupled" else ProposalKind.ONE_HOT
        for number, tree in enumerate(self._trees):
            widths = _within(self.widths[: tree.max_depth], tree.max_nodes)
            num_nodes, num_ranks = sum(widths), sum(depth * width for depth, width in enumerate(widths, 1))
            numbers = (
                PendingNumbers(tokens[number, :num_nodes]),
                PendingNumbers(parents_of_all[number, :num_nodes]),
            )
            tree.take_pending(PendingTree(*numbers, kind, None, widths, ranks[number, :num_ranks]), self._fed)


def _within(widths: tuple[int, ...], num_nodes: int) -> tuple[int, ...]:
    """The levels of the first `num_nodes` nodes."""
    begins = accumulate(widths[:-1], initial=0)
    return tuple(
        min(width, num_nodes - begin)
        for width, begin in zip(widths, begins, strict=True)
        if begin < num_nodes
    )
