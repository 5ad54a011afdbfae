"""Batches of records: texts, the branches of them that the target rejected, and the target's rows of both.

A branch's tokens lie behind the text in the same row of a batch and attend to the text before the branch and to
their own path, as draft tokens in a tree do. So the text is computed once for all of its branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import LearnError
from slipstream.learn.learners.objective import TargetRows
from slipstream.learn.records.served import ServedRecord

_HIDDEN = -3e4
"""Finite, so that rows of padding do not become NaN."""


class Example(NamedTuple):
    """A record as a learner reads it: L tokens, of which the first are the text, and n rows to learn."""

    tokens: NDArray[np.int64]
    """[L]"""
    positions: NDArray[np.int64]
    """[L]"""
    visible: NDArray[np.bool_]
    """[L, L]: which tokens each one attends to."""
    places: NDArray[np.int64]
    """[n]: the token whose logits each row is of."""
    top_ids: NDArray[np.int64]
    """[n, k]"""
    top_log_probs: NDArray[np.float32]
    """[n, k]"""
    weights: NDArray[np.float32]
    """[n]"""
    history: NDArray[np.int64]
    """[n], as in `TargetRows`."""
    temperature: float


@dataclass(frozen=True)
class LearnBatch:
    """B rows of T tokens, and the n rows of the target that are learned from them."""

    token_ids: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]"""
    attention_mask: Tensor
    """[B, 1, T, T] additive."""
    places: tuple[Tensor, Tensor]
    """Two int64 [n]: the row and the column of the token that each of the target's rows follows."""
    target: TargetRows

    @property
    def previous(self) -> Tensor:
        """int64 [n]: the token before each row's own."""
        return self.token_ids[self.places]


def example_of(record: ServedRecord, length: int) -> Example | None:
    """A record as an example of at most `length` tokens, the latest of its text; None where nothing can be learned."""
    text, prompt = record.text_ids.astype(np.int64), len(record.prompt_ids)
    rows, lengths = record.rows, record.rows.path_lengths()
    text = text[(cut := max(0, len(text) - 1 - length)) : -1]  # the last token is never read
    own = np.flatnonzero(
        (lengths == 0) & (prompt + rows.positions - 1 >= cut) & (rows.positions < len(record.token_ids))
    )
    own = own[np.argsort(rows.positions[own], kind="stable")]
    if not len(own) or not rows.width:
        return None
    tokens, positions = list(text), list(range(len(text)))
    sees: list[list[int]] = []  # of the branches' tokens: the end of the text they see, then nodes
    nodes: dict[tuple[int, ...], int] = {}
    places = [int(place) for place in prompt + rows.positions[own] - 1 - cut]
    weights, chosen = [1.0] * len(own), [int(row) for row in own]
    chances = _Chances(record)
    for row in np.flatnonzero(lengths > 0):
        position, path = int(rows.positions[row]), tuple(rows.path(int(row)))
        end = prompt + position - cut
        new = sum((position, *path[: number + 1]) not in nodes for number in range(len(path)))
        chance = chances.of(position, path)
        if end < 1 or end > len(text) or chance <= 0 or len(tokens) + new > length:
            continue
        for number in range(len(path)):
            name = (position, *path[: number + 1])
            if name not in nodes:
                nodes[name] = len(tokens)
                sees.append([end, *(nodes[(position, *path[: up + 1])] for up in range(number + 1))])
                tokens.append(path[number])
                positions.append(end + number)
        places.append(nodes[(position, *path)])
        weights.append(chance)
        chosen.append(int(row))
    visible = np.tri(len(tokens), dtype=bool)
    visible[len(text) :] = False
    for at, (end, *path_nodes) in enumerate(sees):
        visible[len(text) + at, :end] = True
        visible[len(text) + at, path_nodes] = True
    return Example(
        np.array(tokens, np.int64),
        np.array(positions, np.int64),
        visible,
        np.array(places, np.int64),
        rows.top_ids[chosen].astype(np.int64),
        np.minimum(rows.top_log_probs[chosen].astype(np.float32), 0.0),
        np.array(weights, np.float32),
        np.concatenate([_history(rows.positions[own]), np.full(len(chosen) - len(own), -1)]),
        record.temperature,
    )


class _Chances:
    """How probable the target found the way into a branch: how often such a row is reached by other answers."""

    def __init__(self, record: ServedRecord) -> None:
        rows = record.rows
        self._rows = {(int(rows.positions[row]), *rows.path(row)): row for row in range(len(rows))}
        self._record = record

    def of(self, position: int, path: tuple[int, ...]) -> float:
        """The product of the probabilities of the path's tokens; 0 for one that is not known."""
        rows, chance = self._record.rows, 1.0
        for number, token in enumerate(path):
            row = self._rows.get((position, *path[:number]))
            if row is None:  # the branch left the text further on
                on_text = self._record.token_ids[position : position + number]
                row = self._rows.get((position + number,)) if tuple(on_text) == path[:number] else None
            if row is None:
                return 0.0
            found = np.flatnonzero(rows.top_ids[row] == token)
            if not len(found):
                return 0.0
            chance *= float(np.exp(rows.top_log_probs[row].astype(np.float32))[found[0]])
        return chance


def _history(positions: NDArray[np.int32]) -> NDArray[np.int64]:
    """For the ascending positions of an answer's rows: how many rows just before are those of the tokens before."""
    history = np.zeros(len(positions), np.int64)
    for at, position in enumerate(positions):
        if at and position == positions[at - 1] + 1:
            history[at] = history[at - 1] + 1
        elif position > 0:
            history[at] = 1  # its token was drafted; of those before nothing is known
    return history


def batch_of(rows: Seq[Seq[Example]], pad: int = 0) -> LearnBatch:
    """Examples side by side in each row, in which none sees another."""
    width = max(sum(len(one.tokens) for one in row) for row in rows)
    token_ids = np.full((len(rows), width), pad, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    visible = np.zeros((len(rows), width, width), bool)
    where, columns = [], []
    for number, row in enumerate(rows):
        at = 0
        for one in row:
            span = slice(at, at + len(one.tokens))
            token_ids[number, span], positions[number, span] = one.tokens, one.positions
            visible[number, span, span] = one.visible
            where.append(np.full(len(one.places), number))
            columns.append(one.places + at)
            at = span.stop
    examples = [one for row in rows for one in row]
    width = min(one.top_ids.shape[1] for one in examples)  # records of another setting may keep fewer tokens
    mask = torch.zeros(visible.shape).masked_fill_(~torch.from_numpy(visible), _HIDDEN)
    target = TargetRows(
        _joined([one.top_ids[:, :width] for one in examples]),
        _joined([one.top_log_probs[:, :width] for one in examples]),
        _joined([np.full(len(one.places), one.temperature, np.float32) for one in examples]),
        _joined([one.weights for one in examples]),
        _joined([one.history for one in examples]),
    )
    return LearnBatch(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        mask[:, None],
        (_joined(where), _joined(columns)),
        target,
    )


def _joined(parts: Seq[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def batches(
    records: Seq[ServedRecord], older: Seq[ServedRecord], *, rows: int, length: int, seed: int
) -> Iterator[LearnBatch]:
    """Batches without end of `rows` rows of at most `length` tokens, half of the rows from older records, if there are
    any.

    Each of the two is read in a new order, again and again. Raises `LearnError` where no record has anything to learn.
    """
    rng = np.random.default_rng(seed)
    sources = [_examples(part, length) for part in (records, older)]
    if not sources[0]:
        raise LearnError(f"none of {len(records)} records has rows of the target to learn from")
    if not sources[1] or rows < 2:
        streams, shares = [_endless(sources[0], length, rng)], [rows]
    else:
        streams, shares = [_endless(source, length, rng) for source in sources], [rows - rows // 2, rows // 2]
    while True:
        yield batch_of(
            [next(stream) for stream, share in zip(streams, shares, strict=True) for _ in range(share)]
        )


def _examples(records: Seq[ServedRecord], length: int) -> list[Example]:
    return [one for record in records if (one := example_of(record, length)) is not None]


def _endless(examples: Seq[Example], length: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """Rows that are filled as far as the next example fits."""
    row: list[Example] = []
    used = 0
    while True:
        for number in rng.permutation(len(examples)):
            one = examples[number]
            if row and used + len(one.tokens) > length:
                yield row
                row, used = [], 0
            row.append(one)
            used += len(one.tokens)
