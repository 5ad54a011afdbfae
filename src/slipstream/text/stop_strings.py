"""Finding the ends of answers in text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for some strings in a text that comes in pieces.

    A piece costs its own length and what of the strings may reach into it, never the whole text. How much of the text's
    end may be the beginning of a string is known as in Knuth, Morris and Pratt's search, at a few steps a character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)
        """How long a beginning of each string, less than the whole, the text ends with."""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """Where in `text` a string begins, and which: the earliest that was not there within `text[:searched]`."""
        start = max(0, searched - self._longest + 1)
        tail = text[start:]
        found: tuple[int, str] | None = None
        for string in self._strings:
            at = tail.find(string, max(0, searched - len(string) + 1 - start))
            if at >= 0 and (found is None or start + at < found[0]):
                found = (start + at, string)
        return found

    def follow(self, piece: str) -> None:
        """Take up the text's next piece."""
        for number, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            matched, last = self._matched[number], len(string) - 1
            for character in piece:
                while matched and string[matched] != character:
                    matched = borders[matched - 1]
                matched += string[matched] == character
                if matched > last:
                    matched = borders[last]
            self._matched[number] = matched

    @property
    def pending(self) -> int:
        """Length of the longest end of the text with which a string begins."""
        return max(self._matched, default=0)


def _borders(string: str) -> list[int]:
    """For each beginning of `string`, how long a shorter beginning it ends with."""
    borders = [0] * len(string)
    matched = 0
    for end in range(1, len(string)):
        while matched and string[matched] != string[end]:
            matched = borders[matched - 1]
        matched += string[matched] == string[end]
        borders[end] = matched
    return borders
