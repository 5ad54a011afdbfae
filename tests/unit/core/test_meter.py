"""What says how far a long piece of work is."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from slipstream.core.meter import meter


def test_without_a_terminal_a_line_comes_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = count(step=4.0)  # the meter looks at it once when it is made, and once for each answer
    monkeypatch.setattr("slipstream.core.meter.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with meter("benchmark", 1200, refreshes=False) as shown:
        for number in range(7):
            shown.advance("off, 1 at once", 200 if number == 2 else 1)
        shown.expect(6)
        shown.advance("ngram, 1 at once")
        shown.advance("ngram, 1 at once")
    assert capsys.readouterr().err.splitlines() == [
        "benchmark: 202 of 1,200 answers, off, 1 at once",
        "benchmark: 205 of 1,200 answers, off, 1 at once",
        "benchmark: 208 of 1,206 answers, ngram, 1 at once",
    ]
