"""Which program of the attention kernel computes what, in arrays that a captured pass reads.

A row's keys are numbered by *columns*: column c is the c-th entry that the row sees, those of its run first, then those
of its path through a tree. So a token's key stands in the same column whether it is a draft or was committed. Columns
are cut into *splits* of `SPLIT` at fixed places. A row's attention is the sum of its splits, added from the first to
the last. An *item* is the work of one program a key head: some rows of one group over some splits. It leaves a
*partial*, and another kernel adds a row's partials in order. An item that begins with the first split may cover several
splits, as it adds them in the same order; any other covers one. Thus the bits of a row depend neither on its
neighbours, nor on how the work was cut, nor on whether the row's text was drafted (FlashDecoding with fixed splits).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.models.batch import ForwardBatch

SPLIT = 256
"""Columns of a split."""
MANY_ITEMS = 1024
"""From so many splits of tiles on a program takes all the splits of its rows: there is work enough without cutting."""
FEW_ITEMS = 256
"""Up to so many items of runs the plan is made without arrays."""

Numbers = NDArray[np.int64]


class PlanSizes(NamedTuple):
    """The lengths of a plan's arrays; those of a bucket are at least those of its passes."""

    num_rows: int
    num_items: int
    num_partials: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of a pass's attention, the same in all layers."""

    items: Numbers
    """[items, 5]: first row, rows, first split, splits, and which partial of its rows it leaves. With a negative number
    of rows it is one row, which reads the tree's entries behind its run; without rows there is nothing to do."""
    partials: Numbers
    """[rows + 1]: where each row's partials begin."""

    @property
    def sizes(self) -> PlanSizes:
        """What it takes."""
        return PlanSizes(len(self.partials) - 1, len(self.items), int(self.partials[-1]))


def plan_attention(batch: ForwardBatch, tile_rows: int, split: int = SPLIT) -> AttentionPlan:
    """The work of a pass over contiguous groups, in tiles of at most `tile_rows` rows."""
    n = batch.num_rows
    run_length = batch.buffer[4 * n : 5 * n]
    tiles = _tiles(batch, tile_rows)
    if n and not batch.tail_begin[-1]:
        longest = np.maximum.reduceat(run_length, [first for first, _ in tiles])
        splits: list[int] = (-(-longest // split)).tolist()
        if sum(splits) <= min(FEW_ITEMS, MANY_ITEMS):
            return _plan_runs(tiles, splits)
    tail_length = np.diff(batch.tail_begin)
    first, count = np.array(tiles, np.int64).reshape(-1, 2).T
    # Of rows with a tail only the splits that lie wholly in their run are computed together.
    own = np.where(tail_length > 0, run_length // split, -(-run_length // split))
    num_splits = np.maximum.reduceat(own, first) if n else own
    items = _cut(first, count, num_splits, tiles_take_all=int(num_splits.sum()) > MANY_ITEMS)
    tile_of = np.repeat(np.arange(len(first)), count)
    num_partials = np.where(num_splits > 0, 1, 0) if len(items) < num_splits.sum() else num_splits
    before = num_partials[tile_of]
    tailed = np.flatnonzero(tail_length)
    ends = -(-(run_length + tail_length)[tailed] // split)
    begins = own[tailed]
    extra = ends - begins
    rows = np.repeat(tailed, extra)
    step = np.arange(len(rows)) - np.repeat(np.cumsum(extra) - extra, extra)
    behind = np.stack(
        [rows, np.full_like(rows, -1), own[rows] + step, np.ones_like(rows), before[rows] + step], 1
    )
    counts = before.copy()
    counts[tailed] += extra
    return AttentionPlan(np.concatenate([items, behind]), np.concatenate([[0], np.cumsum(counts)]))


def _plan_runs(tiles: list[tuple[int, int]], splits: list[int]) -> AttentionPlan:
    """The work of a pass without trees, by tile. Of few items, lists are made faster than arrays."""
    items: list[tuple[int, int, int, int, int]] = []
    counts: list[int] = []
    for (first, count), num_splits in zip(tiles, splits, strict=True):
        items += [(first, count, number, 1, number) for number in range(num_splits)]
        counts += [num_splits] * count
    return AttentionPlan(np.array(items, np.int64), np.array([0, *accumulate(counts)], np.int64))


def _tiles(batch: ForwardBatch, tile_rows: int) -> list[tuple[int, int]]:
    """First row and rows of each tile, which are of one group, and either of its chain or of its tree."""
    tiles: list[tuple[int, int]] = []
    for group, begin, end in zip(batch.groups, batch.first_rows, batch.first_rows[1:], strict=False):
        tree = begin + group.num_chain if group.tail_seen is not None else end
        for first, last in ((begin, tree), (tree, end)):
            tiles += [(row, min(tile_rows, last - row)) for row in range(first, last, tile_rows)]
    return tiles


def _cut(first: Numbers, count: Numbers, num_splits: Numbers, tiles_take_all: bool) -> Numbers:
    """The items over the tiles' runs: one a split, or one for all of a tile's splits."""
    if tiles_take_all:
        some = num_splits > 0
        zeros = np.zeros(int(some.sum()), np.int64)
        return np.stack([first[some], count[some], zeros, num_splits[some], zeros], 1)
    tile = np.repeat(np.arange(len(first)), num_splits)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(num_splits) - num_splits, num_splits)
    return np.stack([first[tile], count[tile], number, np.ones_like(tile), number], 1)
