"""The bars that `benchmarks.learn_serving` has shown, and its page."""

from __future__ import annotations

import json

import pytest

from benchmarks.learn_serving.__main__ import RESULT
from benchmarks.learn_serving.answers import drafted_for, ids_of, memory, needles
from benchmarks.learn_serving.page import page
from benchmarks.learn_serving.steps import NEAR, StepTimes
from benchmarks.learn_serving.traffic import KEPT_WORDS, OUT_WORDS, Answered, asked


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


def test_a_tenants_version_that_drafted_for_another_one_is_found() -> None:
    first, second = asked(1), asked(2)
    assert first.tenant != second.tenant
    owners = {"hers": first.tenant}
    found = [Answered(first, (1,), "hers", 0.1), Answered(second, (1,), "everyones", 0.1)]
    assert drafted_for(found, owners) == {"versions": 1, "answers": 1, "of_others": 0}
    found.append(Answered(second, (1,), "hers", 0.1))
    assert drafted_for(found, owners) == {"versions": 1, "answers": 2, "of_others": 1}


def test_steps_around_a_swap_are_held_against_the_others() -> None:
    times = StepTimes()
    for _ in range(100):
        times.stepped(0.010)
    assert times.status()["swaps"] == 0
    with times.loading():
        times.stepped(0.015)
    times.changed(0.004)
    times.stepped(0.018)  # with what was done before it: 22 ms
    for _ in range(NEAR):
        times.stepped(0.010)
    times.changed(0.001)
    for _ in range(NEAR + 5):
        times.stepped(0.010)
    found = times.status()
    assert (found["steps"], found["swaps"]) == (106, 2)
    assert found["typical_ms"] == found["longest_ms"] == 10.0
    assert found["longest_change_ms"] == 4.0
    assert (found["longest_while_loading_ms"], found["longest_after_ms"]) == (15.0, 22.0)
    assert found["longest_at_swaps_ms"] == 22.0
    assert found["longest_delay_steps"] == pytest.approx(1.2)
    assert (found["swaps_over_bar"], found["share_over_bar_elsewhere"]) == (1, 0.0)
