"""What the engine knows of one request's draft at a worker: a state machine without sockets, threads or clocks.

A *continuation* is draft tokens for one prefix, which it names by its length and hash. A worker drafts ahead on the
assumption that all it has drafted is accepted, so a continuation's prefix may end in draft tokens. Tokens are kept only
as long as everything before them is what the worker had before them. They keep their positions: what is for another
prefix is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from slipstream.draft.remote.protocol import PrefixHash
from slipstream.text.common_prefix import common_prefix_length

MAX_OLD_PREFIXES = 8
"""How many commits back a continuation's prefix may end and still be recognised."""


class Continuation:
    """The draft tokens that follow a request's committed text, as far as they have arrived."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """The committed text."""
        self.drafted: list[int] = []
        """Draft tokens that follow it, each drafted for just this text and the draft tokens before it."""
        self.num_stale = 0
        """Continuations that were dropped: of another prefix, or overtaken by the text."""
        self._hash = PrefixHash()
        self._old: deque[PrefixHash] = deque(maxlen=MAX_OLD_PREFIXES)
        """The hashes of the text at earlier commits, oldest first."""

    @property
    def digest(self) -> bytes:
        """The hash of the committed text."""
        return self._hash.digest()

    def follow(self, token_ids: Seq[int]) -> int:
        """The committed text is now `token_ids`, which begins with what it was; returns how many tokens are new.

        A draft that began with the new tokens is kept from there on, any other one is dropped.
        """
        first = len(self.token_ids)
        new = list(token_ids[first:])
        if not new:
            return 0
        self._old.append(self._hash.copy())
        self._hash.extend(new)
        self.token_ids += new
        if self.drafted[: len(new)] == new:
            del self.drafted[: len(new)]
        else:
            self.drafted.clear()
        return len(new)

    def take(self, length: int, digest: bytes, token_ids: Seq[int]) -> bool:
        """A continuation has arrived for the prefix of `length` tokens with this hash; False where it was dropped."""
        kept = self._joined(length, digest, list(token_ids))
        if kept is None:
            self.num_stale += 1
            return False
        self.drafted = kept
        return True

    def _joined(self, length: int, digest: bytes, token_ids: list[int]) -> list[int] | None:
        """The draft with the continuation; None where the continuation does not belong to this text or adds nothing to
        it."""
        num_committed = len(self.token_ids)
        ahead = length - num_committed
        if ahead > len(self.drafted) or ahead + len(token_ids) <= 0:
            return None  # a part before it is missing, or the text has passed it
        if self._digest_at(length) != digest:
            return None
        if ahead >= 0:
            return [*self.drafted[:ahead], *token_ids]
        if common_prefix_length(token_ids, self.token_ids[length:]) < -ahead:
            return None
        return token_ids[-ahead:]

    def _digest_at(self, length: int) -> bytes | None:
        """The hash of the first `length` tokens of text and draft; None where that was forgotten."""
        num_committed = len(self.token_ids)
        if length >= num_committed:
            return self._hash.digest(self.drafted[: length - num_committed])
        for old in reversed(self._old):
            if old.length <= length:
                return old.digest(self.token_ids[old.length : length])
        return None

    def forget(self) -> None:
        """Drop the draft: the worker that made it is gone."""
        self.drafted.clear()
