"""The bars that `benchmarks.learn_serving` has shown, and its page."""

from __future__ import annotations

import json

from benchmarks.learn_serving.__main__ import RESULT
from benchmarks.learn_serving.answers import ids_of, memory, needles
from benchmarks.learn_serving.page import page
from benchmarks.learn_serving.traffic import KEPT_WORDS, OUT_WORDS, asked


def test_the_page_says_what_was_measured() -> None:
    result = json.loads(RESULT.read_text())
    assert RESULT.with_suffix(".md").read_text(encoding="utf-8") == page(result)


def test_a_request_is_a_function_of_its_number_and_three_of_ten_opt_out() -> None:
    requests = [asked(number) for number in range(100)]
    assert requests == [asked(number) for number in range(100)]
    assert sum(one.opted_out for one in requests) == 30
    assert all((OUT_WORDS in one.message) == one.opted_out for one in requests)


def test_what_is_looked_for_is_in_no_other_prompt() -> None:
    assert len(set(ids_of(OUT_WORDS)) & set(ids_of(KEPT_WORDS))) < len(ids_of(OUT_WORDS)) / 2
    assert not set(needles(OUT_WORDS)) & set(needles(KEPT_WORDS))


def test_growth_is_told_from_the_second_fifth_on() -> None:
    samples = [{"answers": n, "server_mib": 100 + n, "learner_mib": 7} for n in range(50)]
    found = memory(samples)
    assert found["server_mib"] == [104.5, 114.5, 124.5, 134.5, 144.5]
    assert found["server_growth_mib"] == 30.0
    assert found["learner_most_mib"] == [7] * 5
