"""Layers for multi-token prediction as Transformers' code, over entries of each layer's own.

A row of layer k begins where a row of the layer before ended, one token earlier. So the first k tokens have no row in
it, and its entries lie in a sequence's slots from the k-th on. What the layers put out for the text's tokens is kept
with the entries, since the rows of a later pass begin where the last ones ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.draft.heads.head_executor import MtpExecutor, head_bytes, pack_head
from slipstream.draft.heads.mtp_head import MtpHead
from slipstream.kv.pool import KVPool
from slipstream.kv.upload import upload
from slipstream.models import CausalLM
from slipstream.models.attention.base import AttentionPass
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.packed import PackedAttention
from slipstream.models.batch import ForwardBatch
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.rows import RowGroup


class EagerMtp(MtpExecutor):
    """Calls the head's module, whose layers are Transformers' code and attend through the hook."""

    def __init__(self, head: MtpHead, target: CausalLM, fmt: WeightFormat) -> None:
        self.head, self.target, self._number = head, target, len(head.layers)
        for number in range(self._number):
            pack_head(head.layer(number), target, fmt, head.layer(number).called)

    def footprint(self) -> int:
        return head_bytes(self.head)

    def forward(self, rows: ForwardBatch, pool: KVPool, given: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The states are what each layer puts out for the row, [N, layers * hidden]: a row below starts from them.

        Trees need an entry of every layer before them.
        """
        above = given.chunk(self._number, dim=-1) if level else self._before(rows, pool)
        made = [given.new_empty(0)] * self._number
        logits = given.new_empty(0)
        for number in range(self._number):
            if number not in self.head.needed(level):
                made[number] = torch.zeros_like(made[number - 1] if number else above[0])
                continue
            if level:
                states = above[number - 1]
            elif number:
                states = self._behind(rows, made[number - 1], above[number - 1])
            else:
                states = self.head.encode(given)
            output, normed = self._run(number, rows, pool, states)
            made[number] = normed if self.head.form.recycles_normed else output
            if number == level % self._number:
                logits = self.target.project(normed[rows.on(normed.device).logit_rows])
        if not level and self._number > 1:
            pool.features[pool.index(rows.slots_on(given.device))] = torch.cat(made[:-1], dim=-1)
        return torch.cat(made, dim=-1), logits

    def _run(self, number: int, rows: ForwardBatch, pool: KVPool, states: Tensor) -> tuple[Tensor, Tensor]:
        """A layer over the rows [N, hidden], before and behind its final norm; zeros for rows that it has not."""
        if not number:
            return self.call(number, rows, PackedAttention(rows, pool), states)
        groups = [_later(group, number) for group in rows.groups]
        kept = [
            row
            for group, end in zip(groups, rows.first_rows[1:], strict=False)
            for row in range(end - len(group.token_ids), end)
        ]
        made = torch.zeros_like(states), torch.zeros_like(states)
        if kept:
            own = ForwardBatch([group for group in groups if group.token_ids])
            own.drafted = rows.drafted
            index = upload(kept, states.device)
            found = self.call(number, own, PackedAttention(own, pool, number), states[index])
            for whole, part in zip(made, found, strict=True):
                whole[index] = part
        return made

    def call(
        self, number: int, rows: ForwardBatch, attention: AttentionPass, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer over the rows [N, hidden], all of which it has, before and behind its final norm."""
        device, arguments = self.target.device, attention.arguments()
        on = rows.on(device)
        embeds = self.target.embed(on.token_ids)
        with without_cudnn(device):
            output, normed = self.head(number, embeds[None], states[None], on.positions[None], arguments)
        return output[0], normed[0]

    def _before(self, rows: ForwardBatch, pool: KVPool) -> Seq[Tensor]:
        """Of each layer but the last what it put out for the token before each group's rows, [groups, hidden]."""
        slots = [group.slots[max(group.num_before - 1, 0)] for group in rows.groups]
        return pool.features[pool.index(slots)].chunk(self._number - 1, dim=-1) if self._number > 1 else ()

    def _behind(self, rows: ForwardBatch, made: Tensor, before: Tensor) -> Tensor:
        """For each row of the text what the layer above put out for the row before, [N, hidden]."""
        states = made.roll(1, dims=0)
        states[upload(rows.first_rows[:-1], states.device)] = before
        return states


def _later(group: RowGroup, number: int) -> RowGroup:
    """A sequence's rows in a layer that has no rows of its first `number` tokens."""
    if not number:
        return group
    if group.num_before < number:  # a text's beginning
        lost = number - group.num_before
        return RowGroup(group.slots[number:], 0, group.token_ids[lost:], [])
    return replace(
        group,
        slots=group.slots[number:],
        num_past=group.num_past - number,
        positions=None if group.positions is None else [place - number for place in group.positions],
        stored_positions=[place - number for place in group.stored_positions],
    )
