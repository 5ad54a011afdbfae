"""Finding the longest cached prefix of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from slipstream.text.common_prefix import common_prefix_length

BLOCK = 16
"""Prefixes are indexed at every 16th token; a match is then lengthened token by token."""


def block_keys(token_ids: Sequence[int], tenant: str, known: Sequence[int] = ()) -> Iterator[int]:
    """One hash for each full block beyond the `known` ones; it identifies all the text up to the block's end."""
    key = known[-1] if known else hash(tenant)
    for end in range((len(known) + 1) * BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, tuple(token_ids[end - BLOCK : end])))
        yield key


class Text(Protocol):
    """A text whose entries lie in the cache."""

    tenant: str
    token_ids: list[int]
    keys: list[int]
    """Keys of the blocks that are indexed; the index keeps them."""


T = TypeVar("T", bound=Text)


class PrefixIndex(Generic[T]):
    """Texts by the hashes of their prefixes. Hashes only find candidates: tokens are always compared."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[T, None]] = {}

    def extend(self, text: T) -> None:
        """Index the full blocks that `text.token_ids` has gained."""
        for key in list(block_keys(text.token_ids, text.tenant, text.keys)):
            text.keys.append(key)
            self._holders.setdefault(key, {})[text] = None

    def truncate(self, text: T, num_tokens: int) -> None:
        """Forget the blocks of `text` beyond its first `num_tokens` tokens."""
        keep = num_tokens // BLOCK
        for key in text.keys[keep:]:
            holders = self._holders[key]
            del holders[text]
            if not holders:
                del self._holders[key]
        del text.keys[keep:]

    def longest(self, token_ids: Sequence[int], tenant: str) -> tuple[T | None, int]:
        """The text that shares the longest prefix with `token_ids`, and that prefix's length."""
        best: T | None = None
        for key in block_keys(token_ids, tenant):
            holders = self._holders.get(key)
            if not holders:
                break
            best = next(reversed(holders))
        if best is None or best.tenant != tenant:
            return None, 0
        length = common_prefix_length(best.token_ids, token_ids)
        return (best, length) if length >= BLOCK else (None, 0)

    def entries(self) -> Iterator[tuple[int, T]]:
        """Every (key, text) pair, for the integrity check."""
        for key, holders in self._holders.items():
            for text in holders:
                yield key, text
