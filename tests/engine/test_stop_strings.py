"""Stop strings in growing text, against searches of the whole text; and what the hardest of them cost."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.params import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingParams
from slipstream.text.stop_strings import StopStrings


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_against_a_search_of_the_whole_text(pieces: list[str], strings: list[str]) -> None:
    stop = StopStrings(strings)
    text = ""
    for piece in pieces:
        searched, text = len(text), text + piece
        stop.follow(piece)
        beginnings = [string[:length] for string in strings for length in range(1, len(string))]
        assert stop.pending == max((len(part) for part in beginnings if text.endswith(part)), default=0)
        found = stop.find(text, searched)
        ends = [
            (at, string)
            for string in strings
            for at in range(len(text))
            if text.startswith(string, at) and at + len(string) > searched
        ]
        assert found == min(ends, key=lambda end: end[0], default=None)


HARD: dict[str, list[str]] = {
    "many": [chr(200 + number) + "a" * 63 for number in range(MAX_STOPS)],
    "long": ["a" * (MAX_STOP_CHARACTERS - 1) + "b"],
    "alike": ["ab" * (MAX_STOP_CHARACTERS // 32 - number) + "c" for number in range(16)],
}


class Text(str):
    """Counts the characters of the parts that are taken of it."""

    num_taken = 0

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        self.num_taken += len(part)
        return part


@pytest.mark.parametrize("name", HARD)
def test_no_step_pays_for_the_length_of_strings_or_text(name: str) -> None:
    """A search of all beginnings of the strings would run thousands of lines a step, and more for longer strings."""
    strings = [*SamplingParams(stop=HARD[name]).stop]
    stop = StopStrings(strings)
    piece, text = "abab" if name == "alike" else "a", Text("a" * 100_000 + "a")
    num_steps, num_lines = 300, 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(num_steps):
            stop.follow(piece)
            assert stop.find(text, len(text) - 1) is None
    finally:
        sys.settrace(before)
    assert num_lines < num_steps * (len(strings) * (6 * len(piece) + 8) + 12)
    assert text.num_taken <= num_steps * (max(map(len, strings)) + 1)
