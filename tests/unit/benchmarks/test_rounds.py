"""Orders of rounds, and figures of what they came to."""

from __future__ import annotations

from benchmarks.harness.rounds import tail, turns


def test_over_the_rounds_each_is_at_each_place_equally_often() -> None:
    orders = [turns("abc", number) for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert turns(iter((False, True)), 1) == [True, False] == turns((False, True), -1)


def test_tails_are_scaled() -> None:
    assert tail([1.0, 2.0, 3.0], 1000) == {"median": 2000.0, "p99": 2980.0}
