"""Blocks of draft rows behind random anchors in packed texts: what a block drafter is trained on.

A block begins at an anchor, the last committed token. Its rows see the committed tokens before the anchor, of their own
document, and each other. All blocks of a batch are computed in one pass; a row attends to its text and its own block
only, so that the work grows with the number of blocks and not with its square.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.train.batches import TrainingBatch


class AnchoredBlocks(NamedTuple):
    """A blocks in each of B packed rows; rows with fewer places for an anchor have some of which nothing is learned."""

    anchors: Tensor
    """int64 [B, A], ascending: index of each anchor in its row."""
    before: Tensor
    """int64 [B * A]: the token before each anchor in its document, or the anchor's own where there is none."""
    tokens: Tensor
    """int64 [B * A, 1 + drafts]: the text from each anchor on."""
    is_learned: Tensor
    """bool [B * A, drafts]: whether the text's token at anchor + 1 + draft belongs to the anchor's answer."""


def choose_blocks(
    batch: TrainingBatch, num_anchors: int, num_drafts: int, seed: Seq[int]
) -> AnchoredBlocks | None:
    """Random anchors before tokens of answers, at most `num_anchors` a row; None where there are no answers."""
    may_begin = batch.loss_mask.cpu().numpy()
    count = min(num_anchors, int(may_begin.sum(axis=1).max(initial=0)))
    if not count:
        return None
    order = np.where(may_begin, np.random.default_rng(seed).random(may_begin.shape), 2.0)
    chosen = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
    anchors = torch.from_numpy(chosen).to(batch.token_ids.device)
    ahead = anchors[..., None] + torch.arange(num_drafts + 1, device=anchors.device)  # [B, A, 1 + drafts]

    def at(values: Tensor) -> Tensor:
        padded = F.pad(values, (0, num_drafts + 1))
        return padded.gather(1, ahead.flatten(1)).view_as(ahead).flatten(0, 1)

    learned = at(batch.loss_mask)[:, :-1].cumprod(dim=-1).bool()
    inside = batch.positions.gather(1, anchors) > 0
    before = batch.token_ids.gather(1, (anchors - inside.long()).clamp(min=0)).flatten()
    return AnchoredBlocks(anchors, before, at(batch.token_ids), learned)


class AnchoredAttention:
    """The attention of blocks' rows: to the committed tokens before the anchor and to the block; see `Attend`."""

    def __init__(
        self,
        config: DFlashConfig,
        context: Seq[tuple[Tensor, Tensor]],
        anchors: Tensor,
        documents: Tensor,
    ) -> None:
        """`context` are the keys and values [B, kv_heads, T, dim] of the packed rows by layer, `anchors` [B, A],
        `documents` [B, T]."""
        self.context, self.num_blocks = context, anchors.shape[1]
        distance = anchors[..., None] - torch.arange(documents.shape[1], device=anchors.device)  # [B, A, T]
        committed = (distance > 0) & (documents.gather(1, anchors)[..., None] == documents[:, None])
        hidden = {
            window: ~(committed if window is None else committed & (distance <= window))
            for window in set(config.windows)
        }
        self._hidden = [hidden[window][:, None, :, None] for window in config.windows]  # [B, 1, A, 1, T]
        self._causal = config.causal

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.context[layer]
        rows, kv_heads, length, _ = keys.shape
        _, heads, size, _ = query.shape

        def by_text(entries: Tensor) -> Tensor:
            """[B * A, heads, N, dim] -> [B, kv_heads, A, heads / kv_heads * N, dim]"""
            parts = entries.reshape(rows, self.num_blocks, kv_heads, -1, entries.shape[-1])
            return parts.transpose(1, 2)

        queries = by_text(query * query.shape[-1] ** -0.5)
        own_keys, own_values = by_text(key), by_text(value)
        seen = (queries.flatten(2, 3) @ keys.mT).view(*queries.shape[:-1], length)
        seen = seen.masked_fill(self._hidden[layer], float("-inf"))
        own = queries @ own_keys.mT
        if self._causal[layer]:
            later = torch.ones(size, size, dtype=torch.bool, device=own.device).triu(1)
            own = own.masked_fill(later.repeat(heads // kv_heads, 1), float("-inf"))
        weights = torch.cat([seen, own], dim=-1).softmax(dim=-1).to(values.dtype)
        mixed = weights[..., :length].flatten(2, 3) @ values
        mixed = mixed.view(*queries.shape[:-1], -1) + weights[..., length:] @ own_values
        mixed = mixed.transpose(1, 2).reshape(rows * self.num_blocks, heads, size, -1)
        return mixed.transpose(1, 2)
