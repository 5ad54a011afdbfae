"""A store of n-grams with the target's top logits behind them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from slipstream.core.bounded import BoundedDict

ORDERS = (4, 3, 2, 1)
"""Lengths of the n-grams, the longest first."""
ENTRY_BYTES = 120
"""Bytes of an n-gram with its key, as CPython lays them out."""
LOGIT_BYTES = 72
"""Bytes of a token with its logit."""


class NgramRow(NamedTuple):
    """What the target said where an n-gram was the end of the text."""

    token_ids: tuple[int, ...]
    """The most probable tokens, best first."""
    logits: tuple[float, ...]
    """Their raw logits."""


class NgramRows:
    """The target's latest top logits behind each n-gram; bounded, the one written the longest time ago is dropped."""

    def __init__(self, max_entries: int) -> None:
        self._rows: BoundedDict[tuple[int, ...], NgramRow] = BoundedDict(max_entries)

    def __len__(self) -> int:
        """N-grams held."""
        return len(self._rows)

    def add(self, text: Seq[int], row: NgramRow) -> None:
        """Note what the target said behind `text`, of which the last tokens count."""
        for order in ORDERS:
            if len(text) >= order:
                self._rows[tuple(text[-order:])] = row

    def find(self, text: Seq[int]) -> tuple[NgramRow, int] | None:
        """The row of the longest n-gram at the end of `text` that is known, and how many tokens that has."""
        for order in ORDERS:
            if len(text) >= order:
                row = self._rows.get(tuple(text[-order:]))
                if row is not None:
                    return row, order
        return None

    def memory_bytes(self) -> int:
        """Bytes held, at most; n-grams of one place share their row."""
        return sum(ENTRY_BYTES + LOGIT_BYTES * len(row.token_ids) for row in self._rows.values())
