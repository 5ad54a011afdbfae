"""Finds passages in a long text in a bounded time, whatever the text."""

from __future__ import annotations

BLOCK_BYTES = 12
LEAST_BYTES = 2 * BLOCK_BYTES - 1
"""Bytes of a passage, at least: one of so many covers a whole block wherever it begins."""
MOST_PLACES = 32
"""Places kept of each block, the first ones; the further repetitions of a text are not found."""


class BlockIndex:
    """The places of a text's blocks, as in rsync (Tridgell 1999): every occurrence of a passage covers one of them.

    Making it reads the text once; a search looks at `BLOCK_BYTES * MOST_PLACES` places at most.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._places: dict[bytes, list[int]] = {}
        for place in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            places = self._places.setdefault(data[place : place + BLOCK_BYTES], [])
            if len(places) < MOST_PLACES:
                places.append(place)

    def find(self, passage: bytes, begin: int = 0) -> int:
        """The first offset from `begin` on at which the passage is, else the first one before; -1 where it is not.

        Raises `ValueError` for a passage of fewer than `LEAST_BYTES`.
        """
        if len(passage) < LEAST_BYTES:
            raise ValueError(f"a passage must have at least {LEAST_BYTES} bytes, got {len(passage)}")
        found = [
            place - shift
            for shift in range(BLOCK_BYTES)
            for place in self._places.get(passage[shift : shift + BLOCK_BYTES], ())
            if place >= shift and self._data.startswith(passage, place - shift)
        ]
        behind = [at for at in found if at >= begin]
        return min(behind or found, default=-1)
