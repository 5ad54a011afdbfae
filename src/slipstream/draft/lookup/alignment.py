"""Follows an answer along the text that was expected, and finds it again after a difference.

Everything here is a function of the expected text and the answer's tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.text.expected import ExpectedText

LAST_BYTES = 64
"""So much of the answer's end is compared."""
NEAR_BYTES = 8
"""The answer's last bytes that must be equal for the text to go on behind them, within `NEAR_WINDOW_BYTES`."""
NEAR_WINDOW_BYTES = 1024
FAR_BYTES = 24
"""The same for anywhere else."""
WINDOW_TOKENS = 48
"""Tokens of the expected text behind a difference with which the answer's are compared one by one."""
LOST_TOKENS = 24
"""After so many tokens since a difference they are compared no more: a long match has to say where the text goes on."""
MATCHED, REPLACED, INSERTED, DELETED = 2.0, -1.0, -1.1, -0.6
"""Scores of a token; a match of few bytes has less, down to half."""
UNMATCHED_TOKENS = 3
"""After so many tokens since a difference, a place has to follow a matched token."""
SURE_LEAD = 1.0
"""How far the best place must be ahead of the next one, with two matched tokens before it, to be believed."""
MEMORY = 0.8
"""What an earlier stretch counts for next to the latest one."""


class Place(NamedTuple):
    """Where the expected text may go on."""

    offset: int
    """Offset of its bytes."""
    score: float
    """Score of the best way to get there from the difference: more is likelier."""


class Alignment:
    """Where in the expected text an answer is.

    While the answer is as expected it is `followed` byte by byte, so other tokens with the same bytes make no
    difference. After a difference the tokens since are aligned with the expected ones by what was kept, replaced,
    inserted or deleted (Needleman and Wunsch 1970), which ranks the places where the text may go on until one is
    certain. A long match of the answer's end decides at once, so that a deleted or moved passage is survived too.
    """

    def __init__(self, expected: ExpectedText) -> None:
        self.expected = expected
        self.followed = True
        """False after a difference, until the text is found again."""
        self.offset = 0
        """Offset of the bytes that come next while it is followed; else where the difference began."""
        self.num_read = 0
        """Tokens of the answer."""
        self._gap: list[bytes] = []
        """The tokens since the difference."""
        self._last_bytes = b""
        self._scores: list[float] = []
        """Entry j: of the best way to align the tokens since the difference with the next j expected ones."""
        self._runs: list[int] = []
        """Entry j: how many tokens are matched at the end of that way."""
        self._matched, self._missed = 8.0, 1.0
        self._covered = bytearray(len(expected))

    def read(self, output: Seq[int]) -> None:
        """Take in the tokens of the answer that are new since the last call."""
        for token_id in output[self.num_read :]:
            self._advance(self.expected.bytes_of(token_id))
        self.num_read = len(output)

    @property
    def chance(self) -> float:
        """How often the token after one that was as expected is too: recent stretches count most."""
        return self._matched / (self._matched + self._missed)

    @property
    def num_covered(self) -> int:
        """Tokens of the expected text that were found in the answer."""
        return sum(self._covered)

    def places(self) -> list[Place]:
        """Return where the expected text may go on, the likeliest first; one place while it is followed."""
        if self.followed:
            at_end = self.offset >= len(self.expected.data)
            return [] if at_end else [Place(self.offset, math.inf)]
        if len(self._gap) > LOST_TOKENS:
            return []
        first, starts = self._first, self.expected.starts
        ranked = sorted(enumerate(self._scores), key=lambda entry: -entry[1])
        needs_no_match = len(self._gap) <= UNMATCHED_TOKENS
        return [
            Place(starts[first + j], score)
            for j, score in ranked
            if first + j < len(self.expected) and (needs_no_match or self._runs[j])
        ]

    @property
    def _first(self) -> int:
        """The token at which the difference began."""
        return self.expected.token_at(self.offset)

    def _advance(self, piece: bytes) -> None:
        if self.followed and self.offset == 0 and piece[:1] == b" " and self.expected.data[:1] != b" ":
            piece = piece[1:]  # SentencePiece begins a text with a space that is not shown
        self._last_bytes = (self._last_bytes + piece)[-LAST_BYTES:]
        if self.followed and self.expected.data.startswith(piece, self.offset):
            self._cover(self.offset, self.offset + len(piece))
            self.offset += len(piece)
            self._matched += 1
            return
        if self.followed:
            self.followed, self._gap = False, []
            self._matched, self._missed = self._matched * MEMORY, self._missed * MEMORY + 1
            num = min(WINDOW_TOKENS, len(self.expected) - self._first)
            self._scores, self._runs = [DELETED * j for j in range(num + 1)], [0] * (num + 1)
        self._gap.append(piece)
        if len(self._gap) <= LOST_TOKENS:
            self._align(piece)
        offset, num_bytes = self._found()
        if num_bytes:
            self._cover(offset - num_bytes, offset)
            self.followed, self.offset, self._gap = True, offset, []

    def _align(self, piece: bytes) -> None:
        """One more token of the answer: a row of the dynamic programme."""
        starts, data, first = self.expected.starts, self.expected.data, self._first
        worth = MATCHED * min(1.0, 0.5 + len(piece) / 8)
        before, runs = self._scores, self._runs
        scores, new_runs = [before[0] + INSERTED], [0]
        for j in range(1, len(before)):
            token = first + j - 1
            equal = data[starts[token] : starts[token + 1]] == piece
            best, run = (before[j - 1] + worth, runs[j - 1] + 1) if equal else (before[j - 1] + REPLACED, 0)
            if before[j] + INSERTED > best:
                best, run = before[j] + INSERTED, 0
            if scores[j - 1] + DELETED > best:
                best, run = scores[j - 1] + DELETED, 0
            scores.append(best)
            new_runs.append(run)
        self._scores, self._runs = scores, new_runs

    def _found(self) -> tuple[int, int]:
        """Return where the text certainly goes on, and how many bytes before it are the answer's; no bytes where it
        is not certain."""
        starts = self.expected.starts
        if 1 < len(self._gap) <= LOST_TOKENS:
            best = max(range(len(self._scores)), key=self._scores.__getitem__)
            others = (score for j, score in enumerate(self._scores) if j != best)
            run = self._runs[best]
            if run > 1 and self._scores[best] - max(others, default=-math.inf) >= SURE_LEAD:
                offset = starts[self._first + best]
                return offset, sum(map(len, self._gap[-run:]))
        data = self.expected.data
        if len(self._gap) > 1:
            two = max(NEAR_BYTES, len(self._gap[-1]) + len(self._gap[-2]))
            at = data.find(self._last_bytes[-two:], self.offset, self.offset + NEAR_WINDOW_BYTES)
            if at >= 0 and len(self._last_bytes) >= two:
                return at + two, two
        if len(self._last_bytes) >= FAR_BYTES:
            last = self._last_bytes[-FAR_BYTES:]
            at = self.expected.find(last, self.offset)
            if at >= 0:
                return at + FAR_BYTES, FAR_BYTES
        return 0, 0

    def _cover(self, begin: int, end: int) -> None:
        """Note the tokens of the expected text that end within these bytes."""
        starts = self.expected.starts
        token = self.expected.token_at(max(begin, 0))
        while token < len(self.expected) and starts[token] < end:
            if starts[token + 1] <= end:
                self._covered[token] = 1
            token += 1


def num_found(expected: ExpectedText, output: Seq[int]) -> int:
    """Tokens of the expected text that the whole answer has, in their order or near it."""
    alignment = Alignment(expected)
    alignment.read(output)
    return alignment.num_covered
