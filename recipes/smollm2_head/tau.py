"""The acceptance length without an engine: how far a head's greedy chains agree with the target's greedy answers.

The answer is there, so a head drafts behind every token of it at once. A step of decoding accepts the draft tokens that
equal the answer, and goes on behind the target's own token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.train.batches import TrainingBatch
from slipstream.train.block_loss import DraftedTokens, draft_blocks
from slipstream.train.blocks import choose_blocks
from slipstream.train.dflash import BlockStudent
from slipstream.train.eagle import EagleStudent
from slipstream.train.eagle_loss import TargetText, draft_states


def accepted_lengths(student: BlockStudent | EagleStudent, batch: TrainingBatch, num_drafts: int) -> Tensor:
    """int64 [B, T]: how many of `num_drafts` draft tokens behind each token equal the text's; 0 outside answers."""
    with torch.no_grad():
        hits = (
            _block_hits(student, batch)
            if isinstance(student, BlockStudent)
            else _chain_hits(student, batch, num_drafts)
        )
    return hits[..., :num_drafts].cumprod(dim=-1).sum(dim=-1)


def _chain_hits(student: EagleStudent, batch: TrainingBatch, num_drafts: int) -> Tensor:
    head: EagleHead = student.head
    features = torch.cat([batch.hidden_states[layer] for layer in head.config.feature_layers], dim=-1)
    embeds = student.target.embed(batch.token_ids)
    text = TargetText(embeds, features, batch.positions, batch.documents, batch.loss_mask)
    labels = batch.token_ids.flatten()
    hits = torch.zeros(labels.numel(), num_drafts, dtype=torch.long, device=labels.device)
    for step, later, state in draft_states(head, text, num_drafts):
        drafted = head.draft_token_ids[head.logits(state).argmax(dim=-1)]
        following = (later + 1).clamp(max=len(labels) - 1)
        is_learned = batch.loss_mask.flatten()[later]
        hits[later - step, step] = ((drafted == labels[following]) & is_learned).long()
    return hits.unflatten(0, batch.token_ids.shape)


def _block_hits(student: BlockStudent, batch: TrainingBatch) -> Tensor:
    head: DFlashHead = student.head
    length, num_drafts = batch.token_ids.shape[1], head.config.num_drafts
    hits = torch.zeros(*batch.token_ids.shape, num_drafts, dtype=torch.long, device=batch.token_ids.device)
    blocks = choose_blocks(batch, length, num_drafts, [0])
    if blocks is None:
        return hits
    project = student.target.model.get_output_embeddings()
    made = draft_blocks(head, batch, blocks, student.target.embed, project)
    tokens = DraftedTokens.of(blocks, head)
    found = (made.logits.argmax(dim=-1) == tokens.labels) & tokens.is_learned
    rows = torch.arange(len(blocks.anchors), device=found.device)[:, None].expand_as(blocks.anchors)
    hits[rows.flatten(), blocks.anchors.flatten()] = found.long()
    return hits


def steps_of(accepted: Sequence[int], first: int, end: int) -> int:
    """Steps of decoding the answer from token `first` to `end`, of which the first comes from the prompt's pass.

    `accepted` [T] says how many draft tokens behind each token of the text are accepted.
    """
    at, steps = first, 0  # the last committed token
    while at < end - 1:
        at += min(accepted[at] + 1, end - 1 - at)
        steps += 1
    return steps
