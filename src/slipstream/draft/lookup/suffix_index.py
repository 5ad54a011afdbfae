"""Finds earlier occurrences of a text's suffix and what followed them: hash chains over one flat text, as in LZ77.

A suffix tree would take about a kilobyte a token in Python. Here the text is one array of token ids, and for
two short lengths of n-grams each position links to the previous position at which the same n-gram ended. A
look-up walks the two chains of the suffix's n-grams, newest first, at most `max_occurrences` links each, and
measures the length of each match backwards. Positions only grow: the oldest text is dropped by cutting off the
front of the arrays, and links that point before it are dead.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

NGRAM_LENGTHS = (3, 1)
"""Trigrams are rare enough to lead to long matches in few links; single tokens find the short matches."""

_SEPARATOR = -1
"""Put before every document. It equals no token id, so matches and continuations stop at it."""

_NOWHERE = -1


class _Chains:
    """For every n-gram of one length the positions where it ended, from the newest back."""

    __slots__ = ("heads", "n", "previous")

    def __init__(self, n: int) -> None:
        self.n = n
        self.heads: dict[bytes, int] = {}
        """N-gram to the newest position at which it ended."""
        self.previous = array("q")
        """Entry i, for the i-th live position: the position before it with the same n-gram."""

    def memory_bytes(self) -> int:
        entry_bytes = sys.getsizeof(bytes(4 * self.n)) + sys.getsizeof(1 << 20)
        return sys.getsizeof(self.previous) + sys.getsizeof(self.heads) + len(self.heads) * entry_bytes


class SuffixIndex:
    """A queue of documents in which contexts of up to `max_depth` tokens are looked up.

    A token takes 1.3 µs to append and 75 bytes in a large index, up to 170 in a small one; `occurrences` is
    O(max_occurrences * max_depth).
    """

    def __init__(self, max_depth: int, max_occurrences: int) -> None:
        self._max_depth = max_depth
        self._max_occurrences = max_occurrences
        self._text = array("i")
        self._base = 0
        """Position of `_text[0]`."""
        self._first = 0
        """Position of the oldest live document; the dead text before it is cut off from time to time."""
        self._chains = [_Chains(n) for n in NGRAM_LENGTHS]
        self._starts: deque[int] = deque()
        """Positions of the separators, oldest document first."""

    def __len__(self) -> int:
        """Tokens held, one separator a document included."""
        return self._base + len(self._text) - self._first

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    def begin_document(self) -> None:
        """Begin a new document; no match crosses its start."""
        self._starts.append(self._base + len(self._text))
        self._push(_SEPARATOR)

    def extend(self, token_ids: Seq[int], num_context: int = 0) -> None:
        """Append to the newest document. The first `num_context` tokens are matched but never proposed.

        A position enters the chains when the token after it arrives: an occurrence without a continuation
        predicts nothing, and the text's suffix must not match itself.
        """
        start = self._starts[-1]
        for i, token in enumerate(token_ids):
            end = self._base + len(self._text) - 1
            if i >= num_context and end > start:
                self._link(end, end - start)
            self._push(token)

    def drop_oldest_document(self) -> None:
        """Drop the oldest document and the links to it."""
        start = self._starts.popleft()
        end = self._starts[0] if self._starts else self._base + len(self._text)
        for chains in self._chains:
            for position in range(start + chains.n, end):
                ngram = self._ngram(position, chains.n)
                if chains.heads.get(ngram) == position:
                    del chains.heads[ngram]
        self._first = end
        # Cutting moves the rest of the arrays, milliseconds for a million tokens, so it is done only now and then.
        num_dead = end - self._base
        if num_dead > len(self._text) // 4:
            for cut in (self._text, *(chains.previous for chains in self._chains)):
                del cut[:num_dead]
            self._base = end

    def occurrences(self, text: Seq[int]) -> list[tuple[int, int]]:
        """Earlier occurrences of the end of `text`: (position of the next token, length of the match).

        Matches of the longer n-gram come first, and the newest first of each length.
        """
        last_first = text[: -self._max_depth - 1 : -1]
        found = []
        longer = self._max_depth + 1
        for chains in self._chains:
            if len(last_first) >= chains.n:
                for position in self._walk(chains, array("i", text[-chains.n :]).tobytes()):
                    length = self._agreement(position, last_first)
                    # Matches that long were found by the longer n-gram already: its newest occurrences include
                    # all of them that are among the newest of the shorter n-gram.
                    if length < longer:
                        found.append((position + 1, length))
            longer = chains.n
        return found

    def continuations(self, places: list[int], depth: int) -> dict[int, list[int]]:
        """`places` grouped by the token at `place + depth`; places whose document has ended are omitted."""
        groups: dict[int, list[int]] = {}
        text, offset = self._text, depth - self._base
        for place in places:
            at = place + offset
            if at < len(text) and (token := text[at]) != _SEPARATOR:
                groups.setdefault(token, []).append(place)
        return groups

    def memory_bytes(self) -> int:
        """Bytes held by the text, the links and their tables."""
        starts_bytes = sys.getsizeof(self._starts) + self.num_documents * sys.getsizeof(1 << 20)
        return sys.getsizeof(self._text) + starts_bytes + sum(c.memory_bytes() for c in self._chains)

    def integrity(self) -> list[str]:
        """Violated invariants; empty when there are none. Walks everything, so it is for tests."""
        end = self._base + len(self._text)
        problems = []
        for chains in self._chains:
            if len(chains.previous) != len(self._text):
                problems.append(f"{len(chains.previous)} links for {len(self._text)} positions")
            for ngram, head in chains.heads.items():
                if not self._first <= head < end or self._ngram(head, chains.n) != ngram:
                    problems.append(f"the chain of {ngram!r} starts at {head}, where it does not occur")
        live = range(self._first, end)
        if list(self._starts) != [at for at in live if self._text[at - self._base] == _SEPARATOR]:
            problems.append("document starts and separators differ")
        return problems

    def _push(self, token: int) -> None:
        self._text.append(token)
        for chains in self._chains:
            chains.previous.append(_NOWHERE)

    def _link(self, position: int, num_tokens: int) -> None:
        """Enter `position` into the chains; its document has `num_tokens` tokens up to there."""
        for chains in self._chains:
            if num_tokens >= chains.n:
                ngram = self._ngram(position, chains.n)
                chains.previous[position - self._base] = chains.heads.get(ngram, _NOWHERE)
                chains.heads[ngram] = position

    def _ngram(self, position: int, n: int) -> bytes:
        end = position - self._base + 1
        return self._text[end - n : end].tobytes()

    def _walk(self, chains: _Chains, ngram: bytes) -> Iterator[int]:
        """The newest live positions at which `ngram` ended."""
        position = chains.heads.get(ngram, _NOWHERE)
        for _ in range(self._max_occurrences):
            if position < self._first:
                return
            yield position
            position = chains.previous[position - self._base]

    def _agreement(self, position: int, last_first: Seq[int]) -> int:
        """How many tokens up to `position` equal `last_first`, going backwards."""
        text, at = self._text, position - self._base
        for length, token in enumerate(last_first):
            if text[at - length] != token:
                return length
        return len(last_first)
