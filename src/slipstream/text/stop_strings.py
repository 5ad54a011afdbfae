"""Incremental search for stop strings in a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches for strings in a text that arrives in pieces.

    The work for a piece grows with its length and that of the strings, not with the whole text. The longest suffix of
    the text that is a prefix of a string is tracked as in the search of Knuth, Morris and Pratt.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)
        """For each string: length of its longest proper prefix that is a suffix of the text."""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """(position, string) of the earliest match in `text` that does not end within `text[:searched]`, or None."""
        start = max(0, searched - self._longest + 1)
        rest = text[start:]
        found: tuple[int, str] | None = None
        for string in self._strings:
            at = rest.find(string, max(0, searched - len(string) + 1 - start))
            if at >= 0 and (found is None or start + at < found[0]):
                found = (start + at, string)
        return found

    def follow(self, piece: str) -> None:
        """Advance the prefix matches by the text's next piece."""
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
        """Length of the longest suffix of the text that a string could begin with."""
        return max(self._matched, default=0)


def _borders(string: str) -> list[int]:
    """For each prefix of `string`: length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    matched = 0
    for end in range(1, len(string)):
        while matched and string[matched] != string[end]:
            matched = borders[matched - 1]
        matched += string[matched] == string[end]
        borders[end] = matched
    return borders
