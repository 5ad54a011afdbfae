"""What a learner makes small: acceptance itself, and the divergence from the target, at the rows that were checked.

The target's rows are kept as their k most probable tokens; all others are one bucket. Under the coupled verifier and at
temperature 1 a draft token is right about as often as the two distributions overlap, sum of min(p, q) (Leviathan et
al., 2023), so one minus the overlap, the total variation, is what drafting loses. Its gradient vanishes where the
draft is far off; the forward divergence helps there (Zhou et al., "DistillSpec", ICLR 2024).

Greedy answers need the most probable token alone. For them both distributions are sharpened.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TEMPERATURE = 0.5
"""Colder answers are learned as if at this temperature: what is learned at 0 is one token a row."""
_SMALLEST = 1e-9


@dataclass(frozen=True)
class TargetRows:
    """The target's distribution at n rows."""

    top_ids: Tensor
    """int64 [n, k]"""
    top_log_probs: Tensor
    """float32 [n, k], at temperature 1."""
    temperatures: Tensor
    """float32 [n]: of the answers that the rows are from."""
    weights: Tensor
    """float32 [n]: how often such a row is reached, as far as the record tells."""
    history: Tensor
    """int64 [n]: how many of the rows just before are those of the tokens before, on the same answer; -1 for rows in
    branches."""

    def at(self, numbers: Tensor) -> TargetRows:
        """The rows of these numbers, int64 [m]."""
        return TargetRows(
            self.top_ids[numbers],
            self.top_log_probs[numbers],
            self.temperatures[numbers],
            self.weights[numbers],
            self.history[numbers],
        )


@dataclass(frozen=True)
class LearnLoss:
    """A loss and what it consists of."""

    loss: Tensor
    overlap: float
    """Mean overlap of draft and target, weighted: estimated acceptance at the first draft token."""
    divergence: float
    """Mean forward divergence in nats, weighted."""


def learn_loss(logits: Tensor, rows: TargetRows, depth: int, overlap_weight: float = 1.0) -> LearnLoss:
    """The loss of a draft's `logits` [n, vocab] for chains of `depth` draft tokens.

    A row's weight is how often a step reaches it with a draft token: an answer's first token comes with the prompt, and
    one that follows `depth` right ones comes free. Both chances follow from the draft's own overlaps.
    """
    divergence, overlap = row_losses(logits, rows)
    weights = rows.weights * reached(overlap.detach(), rows.history, depth)
    return weighted_loss([divergence], [overlap], [weights], overlap_weight)


def weighted_loss(
    divergences: Seq[Tensor], overlaps: Seq[Tensor], weights: Seq[Tensor], overlap_weight: float
) -> LearnLoss:
    """What is made small, of the rows of one or several groups: each of the three has a tensor [n] a group."""
    divergence, overlap, weight = (torch.cat(list(parts)) for parts in (divergences, overlaps, weights))
    total = weight.sum().clamp(min=_SMALLEST)
    loss = (weight * (divergence + overlap_weight * (1 - overlap))).sum() / total
    with torch.no_grad():
        means = [float((weight * one).sum() / total) for one in (overlap, divergence)]
    return LearnLoss(loss, *means)


def row_losses(logits: Tensor, rows: TargetRows, draft_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(forward divergence [n], overlap [n]) of a draft's `logits` [n, draft vocab] and the target's rows.

    `draft_ids`, int64 [vocab], has the place of each of the target's tokens in the draft's vocabulary, -1 for those
    that it cannot draft; None where it has them all. These are left out: the divergence is from the target's
    distribution over the others, the overlap counts them as lost.
    """
    temperatures = rows.temperatures.clamp(LEAST_TEMPERATURE, 1.0)[:, None]
    log_q = torch.log_softmax(logits / temperatures, dim=-1)
    log_p, p_tail = _sharpened(rows, temperatures, logits.shape[1] if draft_ids is None else len(draft_ids))
    at = rows.top_ids if draft_ids is None else draft_ids[rows.top_ids]
    known = at >= 0
    p, log_q = log_p.exp(), log_q.gather(1, at.clamp(min=0))  # [n, k]
    q = log_q.exp() * known
    q_tail = (1 - q.sum(-1)).clamp(min=_SMALLEST)
    log_mass = ((p * known).sum(-1) + p_tail).clamp(min=_SMALLEST).log()  # 0 where all are known
    possible = p * known / log_mass.exp()[:, None]
    divergence = (possible * (log_p - log_mass[:, None] - log_q)).sum(-1)
    tail = p_tail / log_mass.exp()
    divergence = divergence + tail * (tail.clamp(min=_SMALLEST).log() - q_tail.log())
    overlap = torch.minimum(p, q).sum(-1) + torch.minimum(p_tail, q_tail)
    return divergence, overlap


def reached(overlap: Tensor, history: Tensor, depth: int) -> Tensor:
    """float32 [n]: the chance that a step drafts the row's token, in chains of `depth`, for overlaps [n].

    0 for an answer's first token; 1 for the next `depth`; then one minus the chance that the `depth` tokens before were
    all right, since the target's own token follows these. 1 for rows in branches, whose weight tells already.
    """
    logs = overlap.clamp(_SMALLEST, 1.0).log().double()
    before = torch.cat([logs.new_zeros(1), logs.cumsum(0)])  # [n + 1]: sums before each row
    at = torch.arange(len(logs), device=logs.device)
    all_right = (before[at] - before[(at - depth).clamp(min=0)]).exp().float()
    chance = torch.where(history > depth, 1 - all_right, torch.ones_like(all_right))
    return torch.where(history == 0, torch.zeros_like(chance), chance)


def _sharpened(rows: TargetRows, temperatures: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities [n, k], the tail's probability [n]) at `temperatures` [n, 1].

    The tail is taken to be spread evenly over its tokens.
    """
    others = vocab_size - rows.top_ids.shape[1]
    tail = (1 - rows.top_log_probs.exp().sum(-1)).clamp(min=0.0)  # [n]
    powers = rows.top_log_probs / temperatures
    if not others:
        return torch.log_softmax(powers, dim=-1), tail.new_zeros(len(tail))
    each = (tail / others).clamp(min=1e-30).log() / temperatures[:, 0]
    tail_power = each + torch.tensor(float(others)).log()
    norm = torch.logsumexp(torch.cat([powers, tail_power[:, None]], dim=1), dim=1)
    return powers - norm[:, None], (tail_power - norm).exp()
