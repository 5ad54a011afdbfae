"""A bounded mapping forgets what was used the longest time ago."""

from __future__ import annotations

import pytest

from slipstream.core.bounded import BoundedDict


def test_the_oldest_entry_makes_room() -> None:
    held: BoundedDict[str, int] = BoundedDict(2)
    for number, key in enumerate("abc"):
        held[key] = number
    assert dict(held) == {"b": 1, "c": 2}


def test_setting_and_touching_are_uses_and_reading_is_none() -> None:
    held: BoundedDict[str, int] = BoundedDict(3)
    for key in "abc":
        held[key] = 0
    held["a"] = 1
    assert held.touch("b", lambda: 9) == 0
    assert (held["c"], held.get("c")) == (0, 0)
    held["d"] = 2
    assert list(held) == ["a", "b", "d"]


def test_what_is_touched_is_made_once() -> None:
    held: BoundedDict[str, list[int]] = BoundedDict(2)
    held.touch("a", list).append(1)
    assert held.touch("a", list) == [1]
    held.touch("b", list)
    held.touch("c", list)
    assert held.touch("a", list) == []


def test_dropped_entries_are_handed_over_once_they_are_gone() -> None:
    dropped: list[tuple[str, int, int]] = []
    held: BoundedDict[str, int] = BoundedDict(1, lambda key, value: dropped.append((key, value, len(held))))
    held["a"] = 1
    held["a"] = 2
    held.touch("b", lambda: 3)
    held.drop_oldest()
    assert dropped == [("a", 2, 0), ("b", 3, 0)]
    with pytest.raises(KeyError):
        held.drop_oldest()


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    held: BoundedDict[str, float] = BoundedDict(2)
    with pytest.raises(ZeroDivisionError):
        held.touch("a", lambda: 1 / 0)
    assert len(held) == 0
