"""The page of the replicas is what its results say."""

from __future__ import annotations

from collections import Counter

from benchmarks.deploy.affinity import SYSTEM_TOKENS, Traffic, conversations, order_of
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


def test_the_share_of_one_cache_is_said_with_its_bar() -> None:
    results = read_results()
    cells = {
        str(num): {
            "requests": 192,
            "replicas": num,
            "fleet": {"share": 0.75 * share, "num_slots": 2000 * num},
            "one_cache": {"share": 0.75},
            "share_of_one_cache": share,
            "equal_answers": True,
        }
        for num, share in ((2, 0.92), (3, 0.88))
    }
    traffic = {"tenants": 6, "conversations": 8, "streams": 6}
    provenance = results["simulation"]["provenance"]
    measured = {"provenance": provenance, "traffic": traffic, "cells": cells}
    text = page({**results, "affinity": measured})
    assert "| 2 | 4,000 | 69.0 % | 75.0 % | 0.920 | yes | met |" in text
    assert "| 3 | 6,000 | 66.0 % | 75.0 % | 0.880 | yes | missed |" in text
    assert "192 turns of 48 conversations of 6 tenants, 6 at once" in " ".join(text.split())


def test_turns_are_the_same_each_time_and_share_their_tenants_beginning() -> None:
    traffic = Traffic(tenants=2, conversations=3, turns=4)
    assert order_of(traffic) == order_of(traffic) != sorted(order_of(traffic))
    assert Counter(order_of(traffic)) == dict.fromkeys(range(6), 4)
    told, again = conversations(traffic), conversations(traffic)
    assert [(one.said, one.turns) for one in told] == [(one.said, one.turns) for one in again]
    beginnings = {(one.tenant, tuple(one.said)) for one in told}
    assert len(beginnings) == len({said for _, said in beginnings}) == 2
    assert {len(said) for _, said in beginnings} == {SYSTEM_TOKENS}
