"""Masks for PyTorch, made of `ForwardBatch` on the device, once for all layers that are alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.attention.base import PositionBias, first_seen
from slipstream.models.batch import ForwardBatch


class Masks:
    """What the rows of each group may see of their sequence's entries."""

    def __init__(self, rows: ForwardBatch, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._made: dict[tuple[int, int, int], tuple[int, Tensor | None]] = {}
        self._biased: dict[tuple[int, int, int], Tensor] = {}

    def of_group(self, number: int, reach: int, repeats: int) -> tuple[int, Tensor | None]:
        """How many of the oldest entries no row of a group sees, and a mask over the others.

        The mask is bool [repeats * rows, entries], True where a row may look, the block of rows repeated
        for the heads that share a key head; None when every row may look everywhere. See `Variant.reach`.
        """
        group = self._rows.groups[number]
        if group.num_entries <= abs(reach) and (reach > 0 or group.positions is None):
            reach = 0
        key = (number, reach, repeats)
        if key not in self._made:
            self._made[key] = self._make(number, reach, repeats)
        return self._made[key]

    def _make(self, number: int, reach: int, repeats: int) -> tuple[int, Tensor | None]:
        rows, group = self._rows, self._rows.groups[number]
        skipped = 0
        if reach:
            first = min(group.row_positions()) if group.positions is not None else group.num_past
            skipped = min(max(first_seen(first, reach), 0), group.num_past)
        if len(group.token_ids) == 1 and group.tail_seen is None:
            return skipped, None
        on = rows.on(self._device)
        own = slice(rows.first_rows[number], rows.first_rows[number + 1])
        entries = torch.arange(skipped, group.num_entries, device=self._device)
        positions = on.positions[own, None]  # [rows, 1]
        oldest = first_seen(positions, reach)
        visible = (entries < on.run_length[own, None]) & (entries >= oldest)  # [rows, entries]
        if group.tail_seen is not None:
            begin, end = rows.tail_begin[own.start], rows.tail_begin[own.stop]
            lengths = on.tail_begin[own.start + 1 : own.stop + 1] - on.tail_begin[own]
            row = torch.arange(own.stop - own.start, device=self._device)
            row = row.repeat_interleave(lengths, output_size=end - begin)  # [T]: which row sees it
            seen = on.tail_positions[begin:end] >= oldest[row, 0]
            visible[row, on.tail_entries[begin:end] - skipped] = seen
        return skipped, visible.repeat(repeats, 1) if repeats > 1 else visible

    def biased(
        self, number: int, bias: PositionBias, skipped: int, visible: Tensor | None, num_kv_heads: int
    ) -> Tensor:
        """What a layer's bias adds to a group's products, and -inf where a row may not look: [kv_heads, repeats * rows,
        entries]. `skipped` and `visible` are what `of_group` says."""
        key = (number, id(bias), skipped)
        if key not in self._biased:
            rows, group = self._rows, self._rows.groups[number]
            places = [*range(group.num_past), *group.stored_positions, *group.row_positions()][skipped:]
            entries = torch.tensor(places, device=self._device)
            own = slice(rows.first_rows[number], rows.first_rows[number + 1])
            distance = rows.on(self._device).positions[own, None] - entries
            added = bias(distance.clamp(min=0)).reshape(num_kv_heads, -1, len(places))
            self._biased[key] = added if visible is None else added.masked_fill(~visible, -math.inf)
        return self._biased[key]

    def of_all(self) -> Tensor:
        """bool [N, all entries], the sequences' entries side by side: rows see those of their own sequence only."""
        rows = self._rows
        total = sum(group.num_entries for group in rows.groups)
        mask = torch.zeros(rows.num_rows, total, dtype=torch.bool, device=self._device)
        entry = 0
        for number, group in enumerate(rows.groups):
            end = entry + group.num_entries
            _, visible = self.of_group(number, 0, 1)
            own = slice(rows.first_rows[number], rows.first_rows[number + 1])
            mask[own, entry:end] = True if visible is None else visible
            entry = end
        return mask
