"""The rows of one forward pass: which tokens, at which positions, what they see, where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core import Proposal
from slipstream.kv.pool import KVPool


@dataclass(slots=True)
class RowGroup:
    """One sequence's rows in a forward pass.

    Positions 0 .. num_past - 1 lie in the slots from `start` on. Behind them may lie
    `len(stored_positions)` entries of earlier passes over the same draft tree. This pass's rows are stored
    after those. Without `tail_visible` the rows are a chain: each sees all before it. With it, only the first
    `num_chain` rows are, which have no stored entries before them. Each row i behind them sees the past, the chain,
    and entry j of the tail (the stored ones, then the rows behind the chain) where `tail_visible[i, j]`.
    """

    start: int
    num_past: int
    token_ids: Sequence[int]
    logit_rows: Sequence[int]
    """Indices into this group's rows: those whose logits are wanted."""
    positions: Sequence[int] | None = None
    """Absolute position of each row; None for a chain."""
    stored_positions: Sequence[int] = ()
    tail_visible: Tensor | None = None
    """bool [nodes, stored + nodes], where the nodes are the rows behind the chain"""
    num_chain: int = 0
    """Leading rows that see all before them, though others do not; counted where `tail_visible` is given."""
    _views: dict[tuple[int | None, int], tuple[int, Tensor | None]] = field(default_factory=dict)

    @property
    def first_new_slot(self) -> int:
        """Where this pass's first row is stored."""
        return self.start + self.num_past + len(self.stored_positions)

    @property
    def end_slot(self) -> int:
        """One beyond this pass's last row."""
        return self.first_new_slot + len(self.token_ids)

    def row_positions(self) -> Sequence[int]:
        """Absolute position of each row."""
        if self.positions is None:
            return range(self.num_past, self.num_past + len(self.token_ids))
        return self.positions

    def view(
        self, sliding_window: int | None, repeats: int, device: torch.device
    ) -> tuple[int, Tensor | None]:
        """What the rows may see: how many of the oldest entries no row sees, and a mask over the others.

        The mask is bool [repeats * rows, entries], True where a row may look, the block of rows repeated
        for the heads that share a key head; None when every row may look everywhere. It is made once for
        all layers that are alike.
        """
        if sliding_window is not None and self.end_slot - self.start <= sliding_window:
            sliding_window = None
        key = (sliding_window, repeats)
        if key not in self._views:
            self._views[key] = self._make_view(sliding_window, repeats, device)
        return self._views[key]

    def _make_view(
        self, sliding_window: int | None, repeats: int, device: torch.device
    ) -> tuple[int, Tensor | None]:
        positions = self.row_positions()
        skipped = 0
        if sliding_window is not None:
            skipped = min(max(min(positions) - sliding_window + 1, 0), self.num_past)
        if len(positions) == 1 and self.tail_visible is None:
            return skipped, None
        rows = torch.tensor(positions)  # [rows]
        keys = torch.tensor([*range(skipped, self.num_past), *self.stored_positions, *positions])  # [entries]
        if self.tail_visible is None:
            visible = keys[None, :] <= rows[:, None]
        else:
            nodes, tail = self.tail_visible.shape
            visible = torch.ones(len(rows), len(keys), dtype=torch.bool)
            chain = visible[: len(rows) - nodes]
            chain &= keys[None, :] <= rows[: len(chain), None]
            visible[len(chain) :, len(keys) - tail :] = self.tail_visible
        if sliding_window is not None:
            visible &= rows[:, None] - keys[None, :] < sliding_window
        return skipped, visible.repeat(repeats, 1).to(device)


def tree_rows(
    start: int, past: int, token_ids: Sequence[int], proposal: Proposal, first_logit: int
) -> RowGroup:
    """The rows of `token_ids`, behind `past` entries from slot `start` on, and of the tree below the last of them.

    Logits are wanted from row `first_logit` on.
    """
    total = len(token_ids) + len(proposal)
    root = past + len(token_ids) - 1  # position of the last token
    is_chain = proposal.is_chain
    return RowGroup(
        start,
        past,
        [*token_ids, *proposal.token_ids],
        range(first_logit, total),
        positions=None if is_chain else [*range(past, root + 1), *(root + d for d in proposal.depths)],
        tail_visible=None if is_chain else tree_visibility(proposal),
        num_chain=0 if is_chain else len(token_ids),
    )


def tree_visibility(proposal: Proposal) -> Tensor:
    """bool [n, n]: each node sees its ancestors and itself."""
    visible = torch.eye(len(proposal), dtype=torch.bool)
    for node, parent in enumerate(proposal.parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


class Batch:
    """The packed rows of one forward pass and the cache that they read and write."""

    def __init__(self, groups: Sequence[RowGroup], pool: KVPool, device: torch.device) -> None:
        self.groups = groups
        self.pool = pool
        self.device = device
        self._new_slots = self._find_new_slots()

    def _find_new_slots(self) -> slice | Tensor:
        """Where the rows are stored; a slice for a single group, since that is the cheaper way to write."""
        if len(self.groups) == 1:
            return slice(self.groups[0].first_new_slot, self.groups[0].end_slot)
        slots = [slot for group in self.groups for slot in range(group.first_new_slot, group.end_slot)]
        return torch.tensor(slots, device=self.device)

    def input_ids(self) -> Tensor:
        """[1, N]"""
        return torch.tensor([[t for group in self.groups for t in group.token_ids]], device=self.device)

    def position_ids(self) -> Tensor:
        """[1, N]"""
        return torch.tensor([[p for group in self.groups for p in group.row_positions()]], device=self.device)

    def logit_rows(self) -> Tensor:
        """Indices into N of the rows whose logits are wanted, group after group."""
        rows: list[int] = []
        offset = 0
        for group in self.groups:
            rows.extend(offset + row for row in group.logit_rows)
            offset += len(group.token_ids)
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values, [kv_heads, N, dim]; returns all of the layer's."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self._new_slots] = key.transpose(0, 1)
        values[self._new_slots] = value.transpose(0, 1)
        return keys, values
