"""Finding the longest cached prefix of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slipstream.text.common_prefix import common_prefix_length

if TYPE_CHECKING:
    from slipstream.kv.accounting import Segment

BLOCK = 16
"""Prefixes are indexed at every 16th token; a match is then lengthened token by token."""


def block_keys(token_ids: Sequence[int], tenant: str, known: Sequence[int] = ()) -> Iterator[int]:
    """One hash for each full block beyond the `known` ones; it stands for all the text up to the block's end."""
    key = known[-1] if known else hash(tenant)
    for end in range((len(known) + 1) * BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, tuple(token_ids[end - BLOCK : end])))
        yield key


class PrefixIndex:
    """Segments by the hashes of their prefixes. Hashes only find candidates: tokens are always compared."""

    def __init__(self) -> None:
        self._segments: dict[int, dict[Segment, None]] = {}

    def extend(self, segment: Segment) -> None:
        """Index the full blocks that `segment.token_ids` has gained."""
        for key in list(block_keys(segment.token_ids, segment.tenant, segment.keys)):
            segment.keys.append(key)
            self._segments.setdefault(key, {})[segment] = None

    def truncate(self, segment: Segment, num_tokens: int) -> None:
        """Forget the blocks of `segment` beyond its first `num_tokens` tokens."""
        keep = num_tokens // BLOCK
        for key in segment.keys[keep:]:
            holders = self._segments[key]
            del holders[segment]
            if not holders:
                del self._segments[key]
        del segment.keys[keep:]

    def longest(self, token_ids: Sequence[int], tenant: str) -> tuple[Segment | None, int]:
        """The segment that shares the longest prefix with `token_ids`, and that prefix's length."""
        best: Segment | None = None
        for key in block_keys(token_ids, tenant):
            holders = self._segments.get(key)
            if not holders:
                break
            best = next(reversed(holders))
        if best is None or best.tenant != tenant:
            return None, 0
        length = common_prefix_length(best.token_ids, token_ids)
        return (best, length) if length >= BLOCK else (None, 0)

    def entries(self) -> Iterator[tuple[int, Segment]]:
        """Every (key, segment) pair, for the integrity check."""
        for key, holders in self._segments.items():
            for segment in holders:
                yield key, segment
