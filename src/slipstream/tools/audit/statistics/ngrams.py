"""How surprising a text is to one who has read earlier texts: a small n-gram model of hashed counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.tools.audit.statistics.samples import Floats, Integers

_TABLE_BITS = 18
_NUM_ORDERS = 4
"""One token, two, three, and two together with the prompt."""
_BACK_OFF = 2.0
"""How many sightings the shorter context counts for."""
_LEAST = 2.0**-12
"""Probability of a token that was never seen."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BEFORE = -2
"""In place of the tokens before the answer."""

Keys = NDArray[np.uint64]


class Reading:
    """The n-grams of one answer, as places in the tables: [orders, T] each."""

    def __init__(self, prompt: int, tokens: Integers) -> None:
        """`tokens` is one answer without padding."""
        self.num_tokens = len(tokens)
        last = np.concatenate(([_BEFORE], tokens[:-1])) if len(tokens) else tokens
        before = np.concatenate(([_BEFORE, _BEFORE], tokens[:-2]))[: len(tokens)]
        own = np.full(len(tokens), prompt, dtype=np.int64)
        contexts = ((), (last,), (before, last), (own, last))
        self.contexts = np.stack(
            [_place(order, *each, size=len(tokens)) for order, each in enumerate(contexts)]
        )
        self.grams = np.stack(
            [
                _place(order + _NUM_ORDERS, *each, tokens, size=len(tokens))
                for order, each in enumerate(contexts)
            ]
        )


class NgramCounts:
    """What was read so far, source by source."""

    def __init__(self, num_sources: int) -> None:
        self._counts = np.zeros((num_sources, 2**_TABLE_BITS))  # every order has keys of its own

    def add(self, source: int, reading: Reading) -> None:
        """Read one answer of `source`."""
        np.add.at(self._counts[source], reading.contexts, 1.0)
        np.add.at(self._counts[source], reading.grams, 1.0)

    def surprise(self, reading: Reading) -> Floats:
        """Minus log-probability of each token, in nats, by each source's texts and by all together: [1 + sources, T].

        The first row is that of all sources. Each order falls back to the one before it (Jelinek and Mercer, with
        pseudo-counts).
        """
        num_seen = self._counts[:, reading.contexts]  # [sources, orders, T]
        num_equal = self._counts[:, reading.grams]
        num_seen = np.concatenate((num_seen.sum(0, keepdims=True), num_seen))
        num_equal = np.concatenate((num_equal.sum(0, keepdims=True), num_equal))
        probability = np.full((len(num_seen), reading.num_tokens), _LEAST)
        for order in range(_NUM_ORDERS):
            probability = (num_equal[:, order] + _BACK_OFF * probability) / (num_seen[:, order] + _BACK_OFF)
        return np.asarray(-np.log(probability))


def _place(salt: int, *columns: Integers, size: int) -> Keys:
    """A place in the table for each position: the tokens of `columns` there, hashed with `salt`. [T]"""
    key: Keys = np.full(size, salt + 1, dtype=np.uint64) * _MULTIPLIER
    for column in columns:
        key = (key ^ (key >> np.uint64(29)) ^ column.astype(np.uint64)) * _MULTIPLIER
    return key >> np.uint64(64 - _TABLE_BITS)
