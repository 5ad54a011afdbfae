"""Log-probabilities of tokens under the target's unprocessed distribution: measured, and as vLLM shows them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.request import TokenLogprob
from slipstream.core.step import StepItem

BLOCK_ROWS = 64
"""Rows that are normalised at once, which bounds the memory besides the logits however long a prompt's chunk is."""


def token_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
    """One entry a row of `logits` [rows, vocab]; `token_ids[i]` is the token that followed row i.

    `num_top` alternatives each; -1 is all of them.
    """
    entries: list[TokenLogprob] = []
    for first in range(0, len(token_ids), BLOCK_ROWS):
        end = first + BLOCK_ROWS
        entries += _block_logprobs(logits[first:end], token_ids[first:end], num_top)
    return entries


def _block_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    chosen = log_probs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [rows, 1]
    ranks = (log_probs > chosen).sum(dim=1) + 1
    width = log_probs.shape[1]
    top = log_probs.topk(width if num_top < 0 else min(num_top, width), dim=1) if num_top else None
    result: list[TokenLogprob] = []
    for row, token_id in enumerate(token_ids):
        alternatives: tuple[tuple[int, float], ...] = ()
        if top is not None:
            alternatives = tuple(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
        result.append(TokenLogprob(token_id, chosen[row, 0].item(), int(ranks[row]), alternatives))
    return result


def record_prompt_logprobs(item: StepItem) -> None:
    """Add to the sequence the log-probabilities of the prompt tokens that follow the rows of this step.

    To be called before the step's tokens are committed. The first prompt token follows nothing and has none. Rows that
    are computed again after a preemption are skipped.
    """
    sequence = item.sequence
    if not sequence.wants_prompt_logprobs or sequence.params.prompt_logprobs is None:
        return
    if sequence.prompt_logprobs is None:
        sequence.prompt_logprobs = [None]
    first = sequence.num_computed + 1
    token_ids = sequence.token_ids[first : min(first + item.num_rows, sequence.num_prompt_tokens)]
    if token_ids:
        entries = token_logprobs(item.rows[: len(token_ids)], token_ids, sequence.params.prompt_logprobs)
        known = len(sequence.prompt_logprobs) - first
        sequence.prompt_logprobs.extend(entries[max(known, 0) :])


def record_logprobs(item: StepItem) -> None:
    """Add to the sequence the log-probabilities of the tokens that the step emitted, where they are wanted."""
    sequence = item.sequence
    if sequence.params.logprobs is None:
        return
    preceding = [0, *(node + 1 for node in item.verdict.accepted)][: item.num_emitted]  # rows of `logits`
    entries = token_logprobs(item.logits[preceding], item.emitted_token_ids, sequence.params.logprobs)
    sequence.logprobs = [*(sequence.logprobs or []), *entries]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability as vLLM reports it."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token."""
    decoded_token: str | None = None
    """The token's text by itself; a part of a character is a replacement."""


class TokenTexts:
    """The text of single tokens, each decoded once. Copies of it are itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenTexts:
        return self


def by_token(entry: TokenLogprob, texts: TokenTexts) -> dict[int, Logprob]:
    """The token itself and its alternatives, by token id."""
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        if token_id != entry.token_id
    ]
    return {token_id: Logprob(logprob, rank, texts[token_id]) for token_id, logprob, rank in ranked}
