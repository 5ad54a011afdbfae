"""Block drafts as one recording: the entries of what was committed, the pass over the blocks, and what is drawn."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.draft.heads.block_executor import EagerBlocks, Ends, View, seen_by, views_of
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.recorded_heads import recorder_of
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.models.attention.triton import plan_over
from slipstream.models.batch import Bucket, ForwardBatch
from slipstream.models.executor.levels import Levels, PendingDrafts, draw_levels
from slipstream.models.executor.pass_layout import ROWS, doubled
from slipstream.models.executor.recorded_drafts import (
    LEAST_SEEN,
    FirstStates,
    RecordedRows,
    refusal,
    room_for,
    with_room,
)
from slipstream.models.linear.formats import WeightFormat


class BlockSizes(NamedTuple):
    """Of a recording."""

    number: int
    """Blocks."""
    num_rows: int
    """Rows of a block."""
    num_stored: int
    """Rows whose entries are written."""
    wanted: range
    """Rows of a block whose logits are wanted."""


class RecordedBlocks(EagerBlocks):
    """A block head; its rows attend in our Triton kernels while drafts are recorded."""

    def __init__(self, head: DFlashHead, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(head, target, fmt)
        self.drafts = recorder_of(target)

    def draft(
        self, stored: Seq[RowGroup], features: FirstStates, blocks: Seq[RowGroup], ends: Ends, pool: KVPool,
        drafts: PendingDrafts,
    ) -> Tensor | None:  # fmt: skip
        number, shape, wanted = doubled(len(blocks)), drafts.shape, blocks[0].logit_rows
        num_rows, fed = len(blocks[0].token_ids), (1, *shape.fed)
        committed = sum(len(group.token_ids) for group in stored)
        usual = number * (len(fed) + 1)
        reason = refusal(committed, usual, number, max(fed), pool)
        if reason is not None or number * num_rows > ROWS[-1]:
            return self.drafts.refuse(reason or "too many rows")
        num_stored = room_for(committed, usual)
        sizes = BlockSizes(number, num_rows, num_stored, range(wanted[0], wanted[-1] + 1))
        views = {view: self._seen(view, blocks, sizes, pool) for view in views_of(self.config)}
        entries = ForwardBatch(stored, Bucket(num_stored, num_stored, 0), pool.scratch)
        if not all(rows.contiguous for rows in (entries, *(own.rows for own in views.values()))):
            return self.drafts.refuse("slots that are not consecutive")

        def compute(table: Tensor, places: Tensor, ends: Tensor, entries: Tensor, *parts: Tensor) -> Tensor:
            slots, positions = entries.view(2, -1)
            self.write(pool, slots, positions, features.read(places))
            own = [(each, each.views(part), part) for each, part in zip(views.values(), parts, strict=True)]
            attention = {
                view: each.attention(pool, arrays, part)
                for view, (each, arrays, part) in zip(views, own, strict=True)
            }
            states, logits = self.compute(own[0][1], (number, num_rows), attention, sizes.wanted)
            levels = shape.levels(table.view(-1, number))
            return self._draw(levels, fed, states, logits, ends.view(2, -1))

        numbers = [
            with_room(drafts.numbers(), number),
            with_room(np.array([features.places], np.int64), num_stored),
            with_room(np.array(ends, np.int64), number),
            _slots_and_positions(entries),
            *(own.numbers() for own in views.values()),
        ]
        key = (sizes, shape, tuple(own.shape for own in views.values()))
        return self.drafts.draw(pool, key, numbers, compute)

    def _seen(self, view: View, blocks: Seq[RowGroup], sizes: BlockSizes, pool: KVPool) -> RecordedRows:
        """All blocks as layers with this view see them."""
        count = sizes.number * sizes.num_rows
        num_seen = LEAST_SEEN if view == (True, None) else count * sizes.num_rows
        bucket = Bucket(count, sizes.number * len(sizes.wanted), num_seen)
        padded = ForwardBatch([seen_by(view, block) for block in blocks], bucket, pool.scratch)
        return RecordedRows.of(padded, plan_over(padded, pool, self.config.num_attention_heads), bucket)

    def _draw(
        self, levels: Levels, fed: tuple[int, ...], states: Tensor, logits: Tensor, ends: Tensor
    ) -> Tensor:  # fmt: skip
        """What is drawn of the blocks' states and logits."""
        read, begun = self.begin(states, *ends)
        first, corrects = self.config.first_slot, self.head.left_to_right is not None

        def step(level: int, above: Tensor | None) -> tuple[Tensor, Tensor | None]:
            found = logits[:, level].repeat_interleave(fed[level], dim=0)
            if not corrects:  # all nodes of a level share its logits
                return self.spread(found), None
            own = read[:, first + level].repeat_interleave(fed[level], dim=0)
            previous = levels.tokens.clamp(min=0) if level else ends[0]
            found, after = self.step(first + level, own, found, previous, begun if above is None else above)
            return self.spread(found), after

        return draw_levels(levels, len(fed), step)


def _slots_and_positions(rows: ForwardBatch) -> NDArray[np.int64]:
    count = rows.num_rows
    return np.stack([rows.buffer[2 * count : 3 * count], rows.buffer[count : 2 * count]])
