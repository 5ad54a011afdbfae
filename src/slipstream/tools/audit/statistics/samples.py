"""Answers as arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

PAD = -1
"""Follows the end of an answer: no token id and no code point is negative."""

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def padded(answers: Seq[Seq[int]], length: int) -> Integers:
    """Token ids (or code points), cut or filled with `PAD` to `length`: [answers, length]."""
    rows = np.full((len(answers), length), PAD, dtype=np.int64)
    for row, answer in zip(rows, answers, strict=True):
        cut = answer[:length]
        row[: len(cut)] = cut
    return rows


def code_points(texts: Seq[str], length: int) -> Integers:
    """The Unicode code points of texts, for servers that give no token ids: [texts, length]."""
    return padded([[ord(character) for character in text[:length]] for text in texts], length)
