"""Costs that are known, learned back from noisy times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.control.cost import MANY_MISSED, MIN_CALLS, DraftCost, Linear, Mean, StepCost, TextSeen
from slipstream.control.types import DraftCall

PASS_S = 0.02


def noisy(seconds: float, source: random.Random, share: float = 0.05) -> float:
    return seconds * (1 + share * source.gauss(0, 1))


def test_parts_are_found_in_noise() -> None:
    source = random.Random(0)
    linear = Linear([0.0] * 3, [1.0] * 3)
    for _ in range(400):
        features = (1.0, source.randint(1, 8), source.randint(1, 64))
        linear.learn(features, noisy(0.002 + 0.001 * features[1] + 0.0003 * features[2], source))
    assert linear((1, 0, 0)) == pytest.approx(0.002, rel=0.2)
    assert linear((0, 1, 0)) == pytest.approx(0.001, rel=0.1)
    assert linear((0, 0, 1)) == pytest.approx(0.0003, rel=0.05)


def test_parts_are_never_negative() -> None:
    """Though the times fall with a quantity, more of it is not taken to save time."""
    linear = Linear([0.0, 0.0], [1.0, 1.0])
    for quantity in [1.0, 2.0, 3.0, 4.0] * 50:
        linear.learn((1.0, quantity), 0.01 - 0.001 * quantity)
    assert linear((0.0, 1.0)) == pytest.approx(0, abs=1e-9)
    assert linear((1.0, 0.0)) > 0


@pytest.mark.parametrize("when", [0, 50])
def test_a_call_that_hung_hardly_counts(when: int) -> None:
    """Were it the first of all: a drafter may set something up in it."""
    source, linear = random.Random(1), Linear([0.0, 0.0], [1.0, 1.0])
    for i in range(54):
        quantity = source.randint(1, 8)
        linear.learn((1.0, quantity), 5.0 if i == when else noisy(0.004 + 0.001 * quantity, source))
        linear((1.0, 1.0))  # asked between steps, as by a plan
    assert linear((1.0, 4.0)) == pytest.approx(0.008, rel=0.1)


def test_calls_that_failed_at_once_do_not_decide() -> None:
    source, linear = random.Random(2), Linear([0.0, 0.0], [1.0, 1.0])
    for i in range(100):
        quantity = source.randint(1, 8)
        linear.learn((1.0, quantity), 1e-5 if i in (3, 60) else noisy(0.004 + 0.001 * quantity, source))
        linear((1.0, 1.0))
    assert linear((1.0, 4.0)) == pytest.approx(0.008, rel=0.35)


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    source, linear = random.Random(3), Linear([0.0, 0.0], [1.0, 1.0])
    for i in range(2000):
        quantity = source.randint(1, 8)
        seconds = (0.004 + 0.001 * quantity) * (1.0 if i < 400 else factor)
        linear.learn((1.0, quantity), noisy(seconds, source))
    assert linear((1.0, 4.0)) == pytest.approx(0.008 * factor, rel=0.1)


def test_what_steps_do_not_tell_stays_as_it_was_learned() -> None:
    """Thousands of steps without a second quantity leave what was known of it."""
    source, linear = random.Random(4), Linear([0.0, 0.0], [0.01, 0.01])
    for _ in range(100):
        quantity = source.randint(0, 4)
        linear.learn((1.0, quantity), noisy(0.01 + 0.005 * quantity, source))
    for _ in range(20_000):
        linear.learn((1.0, 0.0), noisy(0.01, source))
    assert linear((0.0, 1.0)) == pytest.approx(0.005, rel=0.15)


def test_times_of_zero_do_no_harm() -> None:
    linear = Linear([0.0], [1.0])
    for _ in range(20):
        linear.learn((1.0,), 0.0)
        assert linear((1.0,)) == pytest.approx(0, abs=1e-6)


def test_a_mean_forgets() -> None:
    mean = Mean()
    for _ in range(100):
        mean.learn(1.0)
    assert mean.value == pytest.approx(1)
    for _ in range(200):
        mean.learn(3.0)
    assert mean.value == pytest.approx(3, abs=0.03)


def call_s(call: DraftCall, missed: int) -> float:
    return 0.0005 + 0.002 * call.num_levels + 0.0001 * call.num_tokens + 0.0004 * missed


def test_a_drafters_calls_are_priced_for_batches_that_were_not_made() -> None:
    source, cost = random.Random(5), DraftCost(PASS_S)
    for _ in range(200):
        number, levels = source.randint(1, 8), source.randint(1, 5)
        call = DraftCall(number, levels, number * levels)
        cost.learn(call._replace(seconds=noisy(call_s(call, 0), source)), 0)
    for call in (DraftCall(4, 2, 8), DraftCall(16, 4, 64), DraftCall(1, 8, 8)):
        assert cost(call) == pytest.approx(call_s(call, 0), rel=0.12)
    assert cost(DraftCall(0, 0, 0)) == 0


def test_one_request_does_not_make_sixteen_look_dear() -> None:
    """Trials are of one request; that a call is shared is believed until it is seen otherwise."""
    cost = DraftCost(PASS_S)
    for _ in range(30):
        cost.learn(DraftCall(1, 3, 3, seconds=0.006), 0)
    assert cost(DraftCall(1, 3, 3)) == pytest.approx(0.006, rel=0.02)
    assert cost(DraftCall(16, 3, 48)) < 0.012


def test_nothing_is_charged_before_a_few_calls_have_drafted() -> None:
    cost = DraftCost(PASS_S)
    for number in range(MIN_CALLS):
        assert not cost.is_known
        assert cost(DraftCall(1, 1, 1)) == 0
        cost.learn(DraftCall(0, 0, 0, seconds=0.04), 100)  # a prompt drafts nothing
        cost.learn(DraftCall(1, 1, 1, seconds=0.003 + 0.0001 * number), 0)
    assert cost.is_known
    assert cost(DraftCall(1, 1, 1)) > 0


def test_text_that_a_drafter_had_missed_is_priced_apart() -> None:
    source, cost = random.Random(6), DraftCost(PASS_S)
    for i in range(60):
        call = DraftCall(1, 3, 3)
        missed = 500 if i % 20 == 0 else 0
        cost.learn(call._replace(seconds=noisy(call_s(call, missed), source)), missed)
    assert cost(DraftCall(1, 3, 3)) == pytest.approx(call_s(DraftCall(1, 3, 3), 0), rel=0.1)
    assert cost.missed_token_s == pytest.approx(0.0004, rel=0.1)


def test_a_few_tokens_are_always_missed_where_drafters_take_turns() -> None:
    cost = DraftCost(PASS_S)
    for missed in [0, 4, 8, 4] * 30:
        cost.learn(DraftCall(1, 2, 2, seconds=call_s(DraftCall(1, 2, 2), missed)), missed)
    assert cost(DraftCall(1, 2, 2)) == pytest.approx(call_s(DraftCall(1, 2, 2), 4), rel=0.05)


def profile_s(rows: float) -> float:
    """Flat, then steep: no straight line."""
    return max(0.02, 0.001 * rows)


def test_a_step_is_first_believed_to_be_its_pass() -> None:
    cost = StepCost(profile_s)
    for rows in (1, 20, 100):
        assert cost.step_s(1, rows, 0, 0) == pytest.approx(profile_s(rows))


def test_the_profiles_shape_holds_on_a_slower_machine() -> None:
    """Steps of few rows tell how much slower passes of many will be, not that rows are free."""
    source, cost = random.Random(7), StepCost(profile_s)
    for _ in range(300):
        rows = source.choice([4, 8, 24, 40])
        seconds = 0.001 + 0.0002 * 4 + 0.0001 * (rows - 4) + 1.5 * profile_s(rows)
        cost.learn(
            num_sequences=4,
            num_rows=rows,
            drafted=4 * (rows > 4),
            checked=rows - 4,
            seconds=noisy(seconds, source),
        )
    assert cost.step_s(4, 4, 0, 0) == pytest.approx(0.0018 + 0.03, rel=0.03)
    assert cost.step_s(4, 30, 4, 26) == pytest.approx(0.0018 + 0.0026 + 0.045, rel=0.06)


def test_steps_that_never_draft_do_not_make_rows_look_free() -> None:
    source, cost = random.Random(8), StepCost(profile_s)
    for _ in range(1000):
        cost.learn(num_sequences=40, num_rows=40, drafted=0, checked=0, seconds=noisy(0.05, source))
    assert cost.step_s(40, 40, 0, 0) == pytest.approx(0.05, rel=0.02)
    assert cost.step_s(40, 80, 40, 40) > 0.08


def test_many_calls_are_priced_at_once() -> None:
    source, cost = random.Random(3), DraftCost(0.01)
    unknown = DraftCall(np.array([1.0, 0.0]), np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    assert not np.any(cost(unknown))
    for _ in range(200):
        number, levels = source.randint(1, 8), source.randint(1, 6)
        seconds = 0.001 + 0.002 * levels + 1e-4 * number
        cost.learn(DraftCall(number, levels, number * levels, seconds=seconds), 2 * number)
    levels_ = np.arange(7.0)
    found = cost(DraftCall(np.where(levels_ > 0, 4.0, 0.0), levels_, 4 * levels_))
    assert found[0] == 0
    assert list(found[1:]) == pytest.approx([cost(DraftCall(4, n, 4 * n)) for n in range(1, 7)])


def test_many_steps_are_priced_at_once() -> None:
    cost = StepCost(profile_s)
    rows = np.array([4.0, 6.5, 30.0])
    expected = [cost.step_s(4, each, min(each - 4, 4), each - 4) for each in rows.tolist()]
    assert list(cost.step_s(4, rows, np.minimum(rows - 4, 4), rows - 4)) == pytest.approx(expected)
    assert expected[2] == pytest.approx(profile_s(30))


def test_rows_of_prompts_are_priced_apart() -> None:
    """They need no logits: what they take says nothing of rows that do."""
    cost = StepCost(lambda rows: 0.001 * rows)
    for step in range(200):
        checked, prompt = step % 5, 100 * (step % 2)
        seconds = 0.001 * (4 + checked) + 0.0004 * prompt
        cost.learn(
            num_sequences=4,
            num_rows=4 + checked + prompt,
            drafted=min(checked, 4),
            checked=checked,
            seconds=seconds,
        )
    for checked, prompt in ((0, 0), (4, 0), (0, 100), (4, 100)):
        expected = 0.001 * (4 + checked) + 0.0004 * prompt
        found = cost.step_s(4, 4 + checked + prompt, min(checked, 4), checked)
        assert found == pytest.approx(expected, rel=0.03), (checked, prompt)


def test_what_any_draft_costs_is_not_taken_for_each_requests() -> None:
    """A lone request cannot show the difference; most of such a cost is the step's."""
    extra_s = 0.002
    cost = StepCost(lambda rows: 0.020)
    for step in range(200):
        drafts = step % 2
        cost.learn(
            num_sequences=1,
            num_rows=1 + drafts,
            drafted=drafts,
            checked=drafts,
            seconds=0.020 + extra_s * drafts,
        )
    alone = cost.step_s(1, 2, 1, 1) - cost.step_s(1, 1, 0, 0)
    assert alone == pytest.approx(extra_s, rel=0.1)
    assert cost.step_s(8, 16, 8, 8) - cost.step_s(8, 8, 0, 0) < 2 * extra_s


# --- text that a drafter has not seen ------------------------------------------------------------------------


def test_text_seen_in_the_prompt_is_not_missed() -> None:
    seen = TextSeen()
    assert seen.note_prompt(1, 2, 100, 100) == 100
    assert seen.note(2, 2, 101) == 0
    assert seen.note(2, 1, 11) == 10, "another sequence"
    assert seen.note(3, 1, 14) == 0, "what the last step yielded is no missed text"
    assert seen.note(7, 1, 34) == 19, "and what came while it was not asked is"


def test_a_preempted_sequence_that_comes_back_is_not_forgotten_twice() -> None:
    """What its drafter saw of it before is lost, what it has seen since is not."""
    seen = TextSeen()
    seen.note(1, 1, 100)
    seen.release(1)
    assert len(seen) == 0
    assert seen.note_prompt(2, 1, 100, 100) == 100
    assert seen.note(3, 1, 101) == 0


def test_only_long_texts_are_missing() -> None:
    seen = TextSeen()
    assert seen.num_missing(1, MANY_MISSED - 1) == 0
    assert seen.num_missing(1, MANY_MISSED) == MANY_MISSED
    seen.note(1, 1, 100)
    assert seen.num_missing(1, 120) == 0
