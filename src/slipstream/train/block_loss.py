"""The losses of block drafters: what is learned of each draft token, and how it is weighted along a block.

DFlash learns the text's tokens, weighted less the further they are from the anchor (Chen et al., 2026); JetSpec the
target's distributions, all weighted the same (2026); DSpark mostly what rejection sampling would accept, with a head
that says how much that is (DeepSpec, 2026). A head that corrects the draft from left to right reads the text's own
tokens in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.draft.heads.corrections import CandidateSelector, PrefixGru
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.train.batches import TargetScores, TrainingBatch
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.blocks import AnchoredAttention, AnchoredBlocks

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockPass:
    """What a head computed for n blocks."""

    hidden: Tensor
    """[n, N, hidden]: behind the final norm, all rows."""
    base_logits: Tensor
    """[n, drafts, draft vocab]: of the layers alone."""
    logits: Tensor
    """[n, drafts, draft vocab]: corrected from left to right, after the text's own tokens."""


def draft_blocks(
    head: DFlashHead,
    batch: TrainingBatch,
    blocks: AnchoredBlocks,
    embed: Embed,
    project: Callable[[Tensor], Tensor],
) -> BlockPass:
    """Draft behind all anchors, as in serving: from the target's features before them and mask tokens behind."""
    config = head.config
    features = torch.cat([batch.hidden_states[layer] for layer in config.feature_layers], dim=-1)
    context = head.context_entries(head.encode(features), batch.positions)
    attention = AnchoredAttention(config, context, blocks.anchors, batch.documents)
    slots = torch.arange(config.block_size, device=blocks.anchors.device)
    positions = batch.positions.gather(1, blocks.anchors).flatten()[:, None] + slots
    inputs = torch.full_like(positions, config.mask_token_id)
    inputs[:, 0] = blocks.tokens[:, 0]
    hidden = head(embed(inputs), positions, attention)
    read = hidden[:, config.first_slot :].flatten(
        0, 1
    )  # as one matrix: a batch of thin ones is many times slower
    logits = base_logits = head.logits(read, project).view(len(hidden), config.num_drafts, -1)
    if head.left_to_right is not None:
        text = blocks.tokens[:, : config.block_size]
        logits = head.left_to_right(hidden, base_logits, text, blocks.before, embed)
    for each in {base_logits, logits}:
        if each.requires_grad:
            # Probabilities of a sharp head are denormal numbers, with which a CPU multiplies twenty times slower.
            each.register_hook(lambda gradient: F.hardshrink(gradient, 1e-30))  # type: ignore[no-untyped-call]
    return BlockPass(hidden, base_logits, logits)


@dataclass(frozen=True)
class DraftedTokens:
    """What a draft of n blocks meets when it follows the text; all are [n, drafts]."""

    is_reached: Tensor
    """bool: all draft tokens before it are the text's, and can be drafted."""
    is_learned: Tensor
    """bool: it can be drafted itself, too."""
    labels: Tensor
    """int64: index in the draft vocabulary of the text's token; 0 where it is not learned."""

    @classmethod
    def of(cls, blocks: AnchoredBlocks, head: DFlashHead) -> DraftedTokens:
        """A token outside the draft vocabulary ends what is learned of its block, as it would end the draft."""
        ids = head.draft_token_ids
        index = torch.full((head.config.vocab_size,), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        labels = index[blocks.tokens[:, 1:]]
        is_learned = (blocks.is_learned & (labels >= 0)).cumprod(dim=1).bool()
        is_reached = blocks.is_learned & F.pad(is_learned[:, :-1], (1, 0), value=True)
        return cls(is_reached, is_learned, labels.where(is_learned, 0))


def target_scores(
    batch: TrainingBatch, blocks: AnchoredBlocks, tokens: DraftedTokens, draft_token_ids: Tensor
) -> TargetScores:
    """The target's scores [n, drafts, …] of draft tokens that are reached, arbitrary elsewhere.

    Each token of the text is computed once, however many blocks hold it.
    """
    length = batch.token_ids.shape[1]
    rows = torch.arange(len(blocks.anchors), device=blocks.anchors.device)[:, None]
    first = (rows * length + blocks.anchors).flatten()  # flat index of the token before the first draft token
    at = first[:, None] + torch.arange(tokens.labels.shape[1], device=first.device)
    used = torch.zeros(batch.token_ids.numel(), dtype=torch.bool, device=at.device)
    used[at[tokens.is_reached]] = True
    scores = batch.target_scores_at(used.view_as(batch.token_ids), draft_token_ids)
    place = used.cumsum(0)[at.clamp(max=used.numel() - 1)].sub(1).clamp(min=0)
    return TargetScores(*(part[place] for part in scores))


def block_loss(
    head: DFlashHead,
    batch: TrainingBatch,
    blocks: AnchoredBlocks,
    made: BlockPass,
    options: BlockTrainOptions,
) -> tuple[Tensor, dict[str, float]]:
    """(weighted mean over the draft tokens, means to log) for what `draft_blocks` made of the blocks."""
    tokens = DraftedTokens.of(blocks, head)
    total = made.logits.new_zeros(())
    if not tokens.is_learned.any():
        return total, {}
    scores = None
    if options.losses.keys() - {"hard"}:
        scores = target_scores(batch, blocks, tokens, head.draft_token_ids)
    distance = None
    for logits, share in _learned_logits(head, made, batch.fraction, options.base_until):
        log_q = logits.float().log_softmax(dim=-1)
        if scores is not None and options.losses.keys() & {"total_variation", "confidence"}:
            distance = total_variation(log_q, scores)
        each = token_losses(log_q, tokens, scores, distance, options.losses)
        weights = position_weights(tokens, options, log_q.detach())
        total = total + share * _mean(each * weights, tokens.is_learned)
    metrics = draft_metrics(made.logits.detach(), tokens)
    decay = decay_weights(tokens, options)
    if isinstance(head.left_to_right, CandidateSelector):
        each = selector_losses(head.left_to_right, head.config.first_slot, made, blocks, tokens)
        total = total + options.selector_weight * _mean(each * decay, tokens.is_learned)
    if distance is not None and (weight := options.losses.get("confidence")):
        each, errors = confidence_losses(head, made, blocks, 1 - distance.detach())
        total = total + weight * _mean(each * decay, tokens.is_reached)
        metrics["confidence_error"] = float(errors[tokens.is_reached].mean())
    return total, metrics


def _learned_logits(
    head: DFlashHead, made: BlockPass, fraction: float, base_until: float
) -> list[tuple[Tensor, float]]:
    """Which logits learn the text or the target's distribution, and their shares of the loss."""
    if isinstance(head.left_to_right, CandidateSelector):
        return [(made.base_logits, 1.0)]  # the others are minus infinity outside the candidates
    if isinstance(head.left_to_right, PrefixGru) and fraction < base_until:
        base = 1 - fraction / base_until
        return [(made.base_logits, base), (made.logits, 1 - base)]
    return [(made.logits, 1.0)]


def token_losses(
    log_q: Tensor,
    tokens: DraftedTokens,
    scores: TargetScores | None,
    distance: Tensor | None,
    losses: Mapping[str, float],
) -> Tensor:
    """[n, drafts]: the weighted sum of the losses for the draft's log-probabilities [n, drafts, draft vocab].

    `forward_kl` is of the target's distribution over the draft vocabulary; `distance` is the total variation, of its
    whole one.
    """
    total = log_q.new_zeros(log_q.shape[:-1])
    if weight := losses.get("hard"):
        total = total - weight * log_q.gather(-1, tokens.labels[..., None])[..., 0]
    if scores is not None and (weight := losses.get("forward_kl")):
        log_p = scores.logits.log_softmax(dim=-1)
        total = total + weight * (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if distance is not None and (weight := losses.get("total_variation")):
        total = total + weight * distance
    return total


def total_variation(log_q: Tensor, scores: TargetScores) -> Tensor:
    """[...]: half the sum of |p - q| over the whole vocabulary, of which q is 0 outside the draft's."""
    p = (scores.logits - scores.log_total[..., None]).exp()
    return ((p - log_q.exp()).abs().sum(dim=-1) + 1 - p.sum(dim=-1)) / 2


def confidence_losses(
    head: DFlashHead, made: BlockPass, blocks: AnchoredBlocks, accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """(cross-entropy with the shares `accepted` by rejection sampling; the absolute errors), all [n, drafts]."""
    previous = blocks.tokens[:, : made.logits.shape[1]]
    odds = head.confidence(made.hidden[:, head.config.first_slot :], previous)
    assert odds is not None, "the loss has a part for a confidence head"
    odds, accepted = odds.float(), accepted.clamp(0, 1)
    each = F.binary_cross_entropy_with_logits(odds, accepted, reduction="none")
    return each, (odds.detach().sigmoid() - accepted).abs()


def selector_losses(
    selector: CandidateSelector,
    first_slot: int,
    made: BlockPass,
    blocks: AnchoredBlocks,
    tokens: DraftedTokens,
) -> Tensor:
    """[n, drafts]: cross-entropy over the candidates; the text's token takes the place of the least likely if it is not
    one."""
    base = made.base_logits
    candidates = base.topk(min(selector.top_k, base.shape[-1]), dim=-1).indices
    found = candidates == tokens.labels[..., None]
    is_there = found.any(dim=-1)
    candidates[..., -1] = torch.where(is_there, candidates[..., -1], tokens.labels)
    wanted = torch.where(is_there, found.long().argmax(dim=-1), candidates.shape[-1] - 1)
    read, previous = selector.read(made.hidden)[:, first_slot:], blocks.tokens[:, : base.shape[1]]
    logits = base.gather(-1, candidates) + selector.transitions(read, previous, candidates)
    return -logits.float().log_softmax(dim=-1).gather(-1, wanted[..., None])[..., 0]


def decay_weights(tokens: DraftedTokens, options: BlockTrainOptions) -> Tensor:
    """[drafts]: exp(-k / gamma) for the draft token k places after the block's first; 1 with uniform weights."""
    places = torch.arange(tokens.labels.shape[1], device=tokens.labels.device)
    return (places * (0.0 if options.position_weights == "uniform" else -1 / options.gamma)).exp()


def position_weights(tokens: DraftedTokens, options: BlockTrainOptions, log_q: Tensor) -> Tensor:
    """[n, drafts] or [drafts]: what `--position-weights` says.

    D-PACE: a draft token counts as much as the expected number of draft tokens that stand from it on, if each stands
    with the probability q of the text's token, smoothed to (1 - alpha) q + alpha.
    """
    if options.position_weights != "dpace":
        return decay_weights(tokens, options)
    q = log_q.gather(-1, tokens.labels[..., None])[..., 0].exp()
    stands = torch.where(tokens.is_learned, (1 - options.dpace_alpha) * q + options.dpace_alpha, 0.0)
    reach = stands.cumprod(dim=1)
    return reach.flip(1).cumsum(dim=1).flip(1)


def draft_metrics(logits: Tensor, tokens: DraftedTokens) -> dict[str, float]:
    """How a greedy draft does on the text: `agrees_k` of the tokens that are reached, `tau` tokens of a pass."""
    text = logits.gather(-1, tokens.labels[..., None])[..., 0]
    hits = (text >= logits.amax(dim=-1)) & tokens.is_learned
    begun = tokens.is_reached[:, 0]
    tau = 1 + hits[begun].cumprod(dim=1).sum(dim=1).float().mean()
    rates = hits.sum(dim=0) / tokens.is_reached.sum(dim=0).clamp(min=1)
    return {"tau": float(tau), **{f"agrees_{k + 1}": rate for k, rate in enumerate(rates.tolist())}}


def _mean(each: Tensor, counts: Tensor) -> Tensor:
    return each.where(counts, 0.0).sum() / counts.sum().clamp(min=1)
