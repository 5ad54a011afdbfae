"""Log-probabilities of committed tokens under the target's unprocessed distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
    """One entry a row of `logits` [rows, vocab]; `token_ids[i]` is the token that followed row i."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    chosen = log_probs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [rows, 1]
    ranks = (log_probs > chosen).sum(dim=1) + 1
    top = log_probs.topk(min(num_top, log_probs.shape[1]), dim=1) if num_top else None
    result: list[TokenLogprob] = []
    for row, token_id in enumerate(token_ids):
        alternatives: tuple[tuple[int, float], ...] = ()
        if top is not None:
            alternatives = tuple(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
        result.append(TokenLogprob(token_id, chosen[row, 0].item(), int(ranks[row]), alternatives))
    return result
