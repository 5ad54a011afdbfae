"""Log-probabilities of committed tokens under the target's unprocessed distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core import ScheduledSequence, TokenLogprob

BLOCK_ROWS = 64
"""Rows that are normalised at once: what it takes beside the logits does not grow with a prompt's chunk."""


def token_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
    """One entry a row of `logits` [rows, vocab]; `token_ids[i]` is the token that followed row i."""
    entries: list[TokenLogprob] = []
    for first in range(0, len(token_ids), BLOCK_ROWS):
        end = first + BLOCK_ROWS
        entries += _block_logprobs(logits[first:end], token_ids[first:end], num_top)
    return entries


def _block_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
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


def record_prompt_logprobs(item: ScheduledSequence, rows: Tensor) -> None:
    """Add to the sequence the log-probabilities of the prompt tokens that follow this step's `rows` [rows, vocab].

    The first prompt token follows nothing and has none. Rows that are computed again after a preemption are skipped.
    """
    sequence = item.sequence
    if not sequence.wants_prompt_logprobs or sequence.params.prompt_logprobs is None:
        return
    if sequence.prompt_logprobs is None:
        sequence.prompt_logprobs = [None]
    first = sequence.num_computed + 1
    token_ids = sequence.token_ids[first : min(first + item.num_rows, sequence.num_prompt_tokens)]
    if token_ids:
        entries = token_logprobs(rows[: len(token_ids)], token_ids, sequence.params.prompt_logprobs)
        known = len(sequence.prompt_logprobs) - first
        sequence.prompt_logprobs.extend(entries[max(known, 0) :])
