"""Packs documents into rows and makes training batches; deterministic for a seed."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import ConfigError, RequestError
from slipstream.text.jsonl import check_messages, read_rows
from slipstream.text.prompts import encode_chat, plain_messages
from slipstream.train.attention import PADDING, block_diagonal_mask
from slipstream.train.features import FeatureCache
from slipstream.train.target import FrozenTarget


class TrainingDocument(NamedTuple):
    """A conversation, or a part of one that fits a row."""

    task: str
    tokens: NDArray[np.int64]
    """[L]"""
    is_answer: NDArray[np.bool_]
    """[L]: True for the assistant's tokens, including its end token."""


class TrainingRows(NamedTuple):
    """Packed rows. A token attends only to earlier tokens of its own document."""

    tokens: NDArray[np.int64]
    """[N, T]"""
    documents: NDArray[np.int16]
    """[N, T]: number within the row, -1 on padding."""
    is_answer: NDArray[np.bool_]
    """[N, T]"""
    sources: NDArray[np.int64]
    """[N, T]: index of the token in the concatenated documents, -1 on padding."""

    def take(self, which: slice) -> TrainingRows:
        """Some of the rows."""
        return TrainingRows(
            self.tokens[which], self.documents[which], self.is_answer[which], self.sources[which]
        )


@dataclass(frozen=True)
class TrainingBatch:
    """Packed rows and the target's hidden states for them, without gradients."""

    token_ids: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]: position of each token in its own document."""
    documents: Tensor
    """int64 [B, T]: number within the row, -1 on padding."""
    labels: Tensor
    """int64 [B, T]: the next token of the same document, -100 where there is none."""
    loss_mask: Tensor
    """bool [B, T]: True where the label is the assistant's token."""
    attention_mask: Tensor
    """[B, 1, T, T] additive, block-diagonal and causal."""
    hidden_states: dict[int, Tensor]
    """Layer to [B, T, hidden], for the student's feature layers and the last: 0 is the embedding, the number of layers
    the output of the final norm."""
    target: FrozenTarget
    sources: NDArray[np.int64]
    """[B, T]: see `TrainingRows`."""
    features: FeatureCache | None = None
    step: int = 0
    """Number of the batch in the run."""
    fraction: float = 0.0
    """Fraction of the run's budget that was spent before it."""

    @cached_property
    def target_logits(self) -> Tensor:
        """float32 [B, T, vocab]: the target's logits after each token."""
        return self.target.project(self.hidden_states[self.target.num_layers])

    def target_logits_at(self, where: Tensor) -> Tensor:
        """float32 [n, vocab]: the target's logits where `where`, bool [B, T], is True."""
        return self.target.project(self.hidden_states[self.target.num_layers][where])

    def target_scores_at(self, where: Tensor, token_ids: Tensor) -> TargetScores:
        """The target's scores of `token_ids` [k] after each token where `where`, bool [B, T], is True.

        With a cache the whole vocabulary is computed once for each token, however often it is trained on.
        """
        hidden = self.hidden_states[self.target.num_layers][where]
        sources = self.sources[where.cpu().numpy()]
        if len(token_ids) == self.target.vocab_size or self.features is None:
            logits = self.target.project(hidden)
            return TargetScores.of(logits, token_ids)
        tops, totals = self.features.tops(sources)
        new = tops < 0
        if new.any():
            whole = self.target.project(hidden[torch.from_numpy(new).to(hidden.device)])
            tops[new] = whole.argmax(dim=-1).cpu().numpy()
            totals[new] = whole.logsumexp(dim=-1).cpu().numpy()
            self.features.keep_tops(sources[new], tops[new], totals[new])
        top, total = (torch.from_numpy(values).to(hidden.device) for values in (tops, totals))
        return TargetScores(self.target.project(hidden, token_ids), top, total)


class TargetScores(NamedTuple):
    """What the target makes of some tokens as the next one."""

    logits: Tensor
    """float32 [n, k]"""
    top: Tensor
    """int64 [n]: the most probable token of the whole vocabulary."""
    log_total: Tensor
    """float32 [n]: the logarithm of the sum of the exponentials of all logits, so that `(logits - log_total).exp()` are
    probabilities."""

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor) -> TargetScores:
        """From the `logits` [n, vocab] of the whole vocabulary."""
        return cls(logits[:, token_ids], logits.argmax(dim=-1), logits.logsumexp(dim=-1))


def read_documents(
    files: Seq[Path], tokenizer: Any, length: int, excluded: Set[str] = frozenset()
) -> list[TrainingDocument]:
    """The conversations of JSONL files, cut to `length` tokens, without the lines in `excluded` (`FILE, line N`).

    A line has `token_ids` and `answer_spans`, as written by `slipstream train regenerate`, or `messages`, which are
    encoded with the chat template, or without one as plain text. Lines without an answer are skipped. Raises
    `RequestError` for an invalid line, and when no line is left.
    """
    documents: list[TrainingDocument] = []
    vocab_size = len(tokenizer)
    for file in files:
        for where, row in read_rows(file):
            if where in excluded:
                continue
            tokens, is_answer = _tokens(row, where, tokenizer, vocab_size)
            task = row.get("task", "all")
            for start in range(0, len(tokens), length):
                cut = slice(start, start + length)
                if is_answer[cut][1:].any():
                    documents.append(TrainingDocument(str(task), tokens[cut], is_answer[cut]))
    if not documents:
        raise RequestError(
            f"{', '.join(str(file) for file in files)}: no conversation has an answer to learn"
        )
    return documents


def pack(documents: Seq[TrainingDocument], length: int, pad: int, rng: np.random.Generator) -> TrainingRows:
    """Fill rows of `length` tokens by best fit, longest document first, then shuffle the rows.

    Padding comes to well under 1 % on a few thousand conversations.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    sizes = [len(document.tokens) for document in documents]
    for i in sorted(rng.permutation(len(documents)), key=lambda i: -sizes[i]):
        at = bisect_left(rooms, (sizes[i], -1))
        if at < len(rooms):
            free, row = rooms.pop(at)
        else:
            free, row = length, len(bins)
            bins.append([])
        bins[row].append(i)
        if free > sizes[i]:
            insort(rooms, (free - sizes[i], row))
    offsets = np.cumsum([0, *sizes])
    shape = (len(bins), length)
    rows = TrainingRows(
        np.full(shape, pad, dtype=np.int64),
        np.full(shape, PADDING, dtype=np.int16),
        np.zeros(shape, dtype=bool),
        np.full(shape, -1, dtype=np.int64),
    )
    for row, b in enumerate(rng.permutation(len(bins))):
        at = 0
        for number, i in enumerate(bins[b]):
            span = slice(at, at + sizes[i])
            rows.tokens[row, span] = documents[i].tokens
            rows.documents[row, span] = number
            rows.is_answer[row, span] = documents[i].is_answer
            rows.sources[row, span] = np.arange(offsets[i], offsets[i + 1])
            at = span.stop
    return rows


@dataclass
class Cursor:
    """Position in the data; with the seed it determines the next batch."""

    epoch: int = 0
    row: int = 0
    """First row of the epoch that has not been used."""


def row_batches(
    documents: Seq[TrainingDocument], batch_rows: int, length: int, pad: int, seed: int, cursor: Cursor
) -> Iterator[TrainingRows]:
    """Batches from `cursor` on, epoch after epoch; advances it past each yielded batch. Raises `ConfigError`."""
    while True:
        rows = pack(documents, length, pad, np.random.default_rng([seed, cursor.epoch]))
        while cursor.row + batch_rows <= len(rows.tokens):
            span = slice(cursor.row, cursor.row + batch_rows)
            cursor.row = span.stop
            yield rows.take(span)
        if len(rows.tokens) < batch_rows:
            raise ConfigError(
                f"the data fill {len(rows.tokens)} rows of {length} tokens, too few for a batch of {batch_rows}; "
                "lower --batch-rows or --row-length"
            )
        cursor.epoch, cursor.row = cursor.epoch + 1, 0


def make_batch(
    rows: TrainingRows, target: FrozenTarget, layers: Seq[int], features: FeatureCache | None = None
) -> TrainingBatch:
    """Move `rows` to the target's device, with its hidden states of `layers` and the last layer.

    They are read from `features` where they are kept there, and computed where not.
    """
    device = target.device
    token_ids = torch.from_numpy(rows.tokens).to(device)
    documents = torch.from_numpy(rows.documents).to(device).long()
    labels = next_tokens(token_ids, documents)
    is_answer = torch.from_numpy(rows.is_answer).to(device)
    loss_mask = F.pad(is_answer[:, 1:], (0, 1)) & (labels >= 0)
    mask = block_diagonal_mask(documents, target.dtype)
    positions = document_positions(documents)
    layers = [*layers, target.num_layers]
    if features is None or not features.holds(rows.sources).any():
        hidden = target.hidden_states(token_ids, positions, mask, layers)
    else:
        hidden = features.read(rows.sources, layers, device)
        _compute_missing(hidden, rows, ~features.holds(rows.sources), target)
    return TrainingBatch(
        token_ids, positions, documents, labels, loss_mask, mask, hidden, target, rows.sources, features
    )


def _compute_missing(
    hidden: dict[int, Tensor], rows: TrainingRows, missing: NDArray[np.bool_], target: FrozenTarget
) -> None:
    """Compute the hidden states of the documents whose tokens are `missing` [B, T], in as few rows as they fill."""
    places, parts = [], []
    for row, (documents, lacks) in enumerate(zip(rows.documents, missing, strict=True)):
        for number in np.unique(documents[lacks & (documents != PADDING)]):
            at = np.flatnonzero(documents == number)
            places.append(row * rows.tokens.shape[1] + at)
            parts.append(TrainingDocument("", rows.tokens[row, at], rows.is_answer[row, at]))
    if not parts:
        return
    packed = pack(parts, rows.tokens.shape[1], 0, np.random.default_rng(0))
    computed = make_batch(packed, target, list(hidden)).hidden_states
    real = torch.from_numpy(packed.sources >= 0).to(target.device)
    into = torch.from_numpy(np.concatenate(places)[packed.sources[packed.sources >= 0]]).to(target.device)
    for layer, states in hidden.items():
        states.view(-1, states.shape[-1])[into] = computed[layer][real]


def next_tokens(token_ids: Tensor, documents: Tensor) -> Tensor:
    """[B, T]: the next token of the same document, -100 where there is none."""
    continues = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != PADDING)
    return F.pad(token_ids[:, 1:].masked_fill(~continues, -100), (0, 1), value=-100)


def document_positions(documents: Tensor) -> Tensor:
    """[B, T] document numbers to positions within each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def _tokens(
    row: dict[str, Any], where: str, tokenizer: Any, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(token ids [L], is_answer [L]) of a line; raises `RequestError`."""
    if "token_ids" in row:
        token_ids, spans = row["token_ids"], row.get("answer_spans")
        if not isinstance(spans, list) or not all(
            isinstance(span, list) and len(span) == 2 for span in spans
        ):
            raise RequestError(f"{where}: token_ids need answer_spans, a list of [start, end]")
    else:
        messages = check_messages(row.get("messages"), where)
        try:
            token_ids, spans = _encoded(tokenizer, messages)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
    try:
        tokens = np.array(token_ids, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{where}: token_ids must be a list of whole numbers") from None
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise RequestError(
            f"{where} has a token id outside the vocabulary of {vocab_size}; use data of this target"
        )
    is_answer = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        is_answer[start:end] = True
    return tokens, is_answer


def _encoded(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
    """Token ids of a whole conversation, and the [start, end] spans of its answers, end tokens included.

    Without a chat template an answer has no end token: it is a line of plain text.
    """
    if not tokenizer.chat_template:
        parts = plain_messages(tokenizer, messages)
        ends = list(itertools.accumulate(map(len, parts)))
        answers = [number > 0 and message["role"] == "assistant" for number, message in enumerate(messages)]
        places = zip(parts, ends, answers, strict=True)
        whole = [token for part in parts for token in part]
        return whole, [[end - len(part), end] for part, end, answer in places if answer]
    whole = list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    spans: list[list[int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:
            continue
        start = len(encode_chat(tokenizer, messages[:number]))
        through = tokenizer.apply_chat_template(messages[: number + 1], tokenize=True, return_dict=False)
        spans.append([start, len(through)])
    return whole, spans
