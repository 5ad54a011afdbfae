"""What heads that guess several tokens ahead are trained to minimise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

DECAY = 0.8
"""A head's weight relative to the one before it, as Medusa has it: far guesses are hard and rarely matter."""


def heads_loss(logits: Tensor, targets: Tensor, mask: Tensor | None = None, decay: float = DECAY) -> Tensor:
    """The sum of `head_losses`, head k's times `decay ** k`; a scalar. The loss of Medusa and of Hydra heads."""
    losses = head_losses(logits, targets, mask)
    return (losses * decay ** torch.arange(len(losses), device=losses.device)).sum()


def head_losses(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Each head's mean cross-entropy over the tokens that it guesses: [heads], 0 where there are none.

    `logits` [heads, batch, length, vocab]: row t of head k guesses token t + 2 + k. `targets` is the text, int64
    [batch, length], or, for distillation, the target's probabilities [batch, length, vocab], row t for token t + 1.
    `mask`, bool [batch, length], says which tokens count as something to be guessed.
    """
    length = logits.shape[2]
    distilled = targets.is_floating_point()
    losses = []
    for head, rows in enumerate(logits):
        ahead = head + 2
        guesses = rows[:, : max(length - ahead, 0)].flatten(0, 1)
        # The distribution of token t + 2 + k stands in the row before it.
        wanted = targets[:, ahead - 1 : -1] if distilled else targets[:, ahead:]
        each = cross_entropy(guesses, wanted.flatten(0, 1), reduction="none")
        counts = torch.ones_like(each) if mask is None else mask[:, ahead:].flatten().to(each.dtype)
        losses.append((each * counts).sum() / counts.sum().clamp_min(1))
    return torch.stack(losses)
