"""The page of the replicas is what its results say."""

from __future__ import annotations

from benchmarks.deploy.page import FOLDER, page, read_results
from benchmarks.deploy.routing import Timed, compared


def test_the_page_is_up_to_date() -> None:
    assert (FOLDER / "deploy.md").read_text() == page(read_results())


def test_what_was_measured_is_said_with_its_bar() -> None:
    pairs = [
        (Timed([1, 2, 3], 0.010 + n / 1e5, 0.020), Timed([1, 2, 3], 0.011 + n / 1e5, 0.0235))
        for n in range(5)
    ]
    cell = compared(pairs)
    assert (cell["pairs"], cell["equal"]) == (5, 5)
    assert [round(cell[name]["median"], 3) for name in ("first_token_added_ms", "stream_added_ms")] == [
        1,
        3.5,
    ]
    assert round(cell["token_added_ms"]["median"], 3) == 1.25
    results = read_results()
    said = {**results["simulation"], "expand": "300M", "quantization": "int8"}
    added = page({**results, "routing": {**said, "cells": {"1": cell}}})
    assert (
        "| 1 | 5 of 5 | 1.00 (1.00 to 1.00) | 1.25 (1.25 to 1.25) | 3.50 (3.50 to 3.50) | missed |" in added
    )
    one = {"median": 100.0, "low": 99.0, "high": 101.0}
    two = {"median": 185.0, "low": 184.0, "high": 186.0}
    ratio = {"median": 1.85, "low": 1.8, "high": 1.9}
    scaled = {"rounds": 4, "requests": 48, "front_has_a_core": False}
    scaled |= {"one_tokens_per_s": one, "two_tokens_per_s": two, "two_over_one": ratio}
    text = " ".join(page({**results, "scaling": {**said, "cell": scaled}}).split())
    assert "185 with two: 1.85 (1.80 to 1.90) times, met." in text
    assert "at the cost of 300M parameters in int8" in text
