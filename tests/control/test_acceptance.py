"""What is learned of drafts, against direct counts and known chances."""

from __future__ import annotations

import random

import pytest

from slipstream.control.acceptance import (
    BUCKETS,
    DRAFTER_PRIOR,
    LENGTHS,
    PRIOR,
    Acceptance,
    Drafts,
    LookupYield,
    bucket_of,
)
from slipstream.control.types import MAX_TASKS


def chain(num_tokens: int, num_accepted: int) -> Drafts:
    drafts = Drafts()
    drafts.add(num_tokens, min(num_accepted + 1, num_tokens), num_accepted)
    return drafts


def draw(alphas: list[float], source: random.Random) -> int:
    """Tokens of a chain that are accepted."""
    accepted = 0
    while accepted < len(alphas) and source.random() < alphas[accepted]:
        accepted += 1
    return accepted


def test_survival_equals_a_direct_count() -> None:
    """Each position has its own chance, and what is not reached says nothing."""
    source, alphas = random.Random(0), [0.9, 0.5, 0.8, 0.3]
    acceptance = Acceptance(4)
    reached = [0] * 4
    for i in range(4000):
        accepted = draw(alphas, source)
        acceptance.learn(i % 500, "", chain(4, accepted))
        for position in range(accepted):
            reached[position] += 1
    survival = acceptance.survival(-1, "")
    exact = [0.9, 0.45, 0.36, 0.108]
    assert survival == pytest.approx([count / 4000 for count in reached], abs=0.06)
    assert survival == pytest.approx(exact, abs=0.06)


def test_positions_that_were_never_tried_are_expected_to_be_as_the_one_before() -> None:
    acceptance = Acceptance(3)
    for i in range(200):
        acceptance.learn(i, "", chain(1, 1))
    survival = acceptance.survival(-1, "another task")
    assert survival[0] > 0.95
    assert survival[2] == pytest.approx(survival[0] ** 3, rel=1e-6)


def test_long_texts_are_learned_apart_from_short_ones_of_the_same_task() -> None:
    acceptance = Acceptance(1)
    for i in range(120):
        is_long = i % 2 == 1
        acceptance.learn(i, "chat", chain(1, 0 if is_long else 1), LENGTHS[1] + 10 if is_long else 200)
    short, long = (acceptance.survival(-1, "chat", length)[0] for length in (LENGTHS[0] - 1, LENGTHS[1]))
    assert short > 0.85
    assert long < 0.15
    between = acceptance.survival(-1, "chat", LENGTHS[0])[0]
    assert between == pytest.approx(0.5, abs=0.1), "of a length without drafts, what its task says"


def test_a_position_that_is_no_longer_tried_forgets() -> None:
    """Else a few bad draws would keep a drafter shallow for ever."""
    acceptance = Acceptance(2)
    for i in range(30):
        acceptance.learn(i, "", chain(2, 1))
    before = acceptance.survival(-1, "")[1]
    for i in range(2000):
        acceptance.learn(i, "", chain(1, 1))
    assert before < 0.4
    assert acceptance.survival(-1, "")[1] > 0.85


def test_before_anything_is_known_the_prior_holds() -> None:
    acceptance = Acceptance(3)
    assert acceptance.survival(0, "a") == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    assert acceptance.per_draft(0, "a")[0] == pytest.approx(sum(PRIOR**k for k in (1, 2, 3)))
    assert acceptance.rate() is None


def test_a_request_is_shrunk_to_its_task_and_a_task_to_the_drafter() -> None:
    """Each level moves the estimate by what it has seen, and others' figures only fill the gap."""
    acceptance = Acceptance(1)
    for i in range(300):
        acceptance.learn(i, "sql" if i % 2 else "creative", chain(1, i % 2))
    sql, creative = (acceptance.survival(-1, task)[0] for task in ("sql", "creative"))
    other = acceptance.survival(-1, "unheard of")[0]
    assert sql > 0.9
    assert creative < 0.1
    assert other == pytest.approx(0.5, abs=0.06)
    acceptance.learn(1000, "sql", chain(1, 0))
    after_one = acceptance.survival(1000, "sql")[0]
    for _ in range(30):
        acceptance.learn(1000, "sql", chain(1, 0))
        for other_id in range(4):
            acceptance.learn(other_id, "sql", chain(1, 1))
    assert 0.5 < after_one < sql
    assert acceptance.survival(1000, "sql")[0] < 0.25
    assert acceptance.survival(1, "sql")[0] > 0.8


def test_one_draft_weighs_as_its_prior_says() -> None:
    acceptance = Acceptance(1)
    acceptance.learn(0, "t", chain(1, 1))
    drafter = (1 + DRAFTER_PRIOR * PRIOR) / (1 + DRAFTER_PRIOR)
    assert acceptance.survival(-1, "other")[0] == pytest.approx(drafter)


def test_old_drafts_fade() -> None:
    acceptance = Acceptance(1)
    for good in (True, False):
        for i in range(3000):
            acceptance.learn(i, "t", chain(1, int((i % 10 < 6) == good)))
    assert acceptance.survival(-1, "t")[0] == pytest.approx(0.4, abs=0.08)


def test_a_change_of_the_traffic_is_noticed_within_a_few_drafts() -> None:
    """Where nothing is drafted but in a few trials, the many drafts before must not outweigh them."""
    acceptance = Acceptance(1)
    for i in range(600):
        acceptance.learn(i, "t", chain(1, int(i % 20 == 0)))
    assert acceptance.survival(-1, "t")[0] < 0.1
    for i in range(8):
        acceptance.learn(1000 + i, "t", chain(1, 1))
    assert acceptance.survival(-1, "t")[0] > 0.4


def test_steady_traffic_is_not_taken_for_a_change() -> None:
    """The estimate of many drafts stays as exact as many drafts make it."""
    source, acceptance = random.Random(1), Acceptance(1)
    worst = 0.0
    for i in range(4000):
        acceptance.learn(i, "t", chain(1, draw([0.7], source)))
        if i > 1000:
            worst = max(worst, abs(acceptance.survival(-1, "t")[0] - 0.7))
    assert worst < 0.12


def test_trees_yield_what_they_yielded() -> None:
    acceptance = Acceptance(20)
    for i in range(400):
        drafts = Drafts()
        drafts.add(12, 4, 3 if i % 2 else 2)
        acceptance.learn(i, "t", drafts)
    accepted, checked = acceptance.per_draft(-1, "t")
    assert accepted == pytest.approx(2.5, abs=0.05)
    assert checked == pytest.approx(12, abs=0.3)
    assert acceptance.rate("t") == pytest.approx(2.5 / 12, abs=0.01)


def test_drafts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Drafts().add(2, 1, 2)
    with pytest.raises(ValueError, match="cannot be"):
        Drafts().add(1, 3, 1)


def test_memory_is_bounded() -> None:
    acceptance, lookups = Acceptance(2), LookupYield()
    for i in range(3 * MAX_TASKS):
        acceptance.learn(i, f"task {i}", chain(2, 1))
        lookups.learn(f"task {i}", 4, 1)
        acceptance.release(i)
    assert acceptance.num_held == 0
    assert len(acceptance._tasks) == len(lookups._tasks) == MAX_TASKS
    assert acceptance.rate("task 0") is None
    assert acceptance.rate(f"task {3 * MAX_TASKS - 1}") == pytest.approx(0.5)


def test_released_requests_leave_what_their_task_learned() -> None:
    acceptance = Acceptance(1)
    for _ in range(100):
        acceptance.learn(7, "t", chain(1, 1))
    acceptance.release(7)
    assert not acceptance.knows(7)
    assert acceptance.survival(7, "t")[0] > 0.9
    assert acceptance.num_drafts(7, "t")[0] == 0


@pytest.mark.parametrize(
    ("length", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (15, 4), (16, 5), (99, 5)]
)
def test_buckets(length: int, bucket: int) -> None:
    assert bucket_of(length) == bucket


def test_lookups_are_worth_what_proposals_of_their_length_were() -> None:
    """Short ones are seldom accepted, long ones often, as in text that repeats itself."""
    source, lookups = random.Random(2), LookupYield()
    chances = {0: (0.5, 0.0), 2: (0.3, 0.25), 8: (0.2, 0.9)}
    for _ in range(3000):
        length = source.choices(list(chances), [share for share, _ in chances.values()])[0]
        lookups.learn("t", length, sum(source.random() < chances[length][1] for _ in range(length)))
    rates, shares = lookups.rates("t"), lookups.shares("t")
    assert len(rates) == len(shares) == len(BUCKETS)
    for length, (share, rate) in chances.items():
        assert shares[bucket_of(length)] == pytest.approx(share, abs=0.07)
        assert rates[bucket_of(length)] == pytest.approx(rate, abs=0.07)
    assert sum(shares) == pytest.approx(1)


def test_a_task_without_lookups_takes_those_of_the_others() -> None:
    lookups = LookupYield()
    assert lookups.shares("t") == pytest.approx([1 / len(BUCKETS)] * len(BUCKETS))
    lookups.learn("t", 0, 0)
    assert lookups.shares("t")[bucket_of(4)] > 0.1  # one that found nothing does not decide
    for _ in range(200):
        lookups.learn("other", 4, 4)
    assert lookups.shares("t")[bucket_of(4)] > 0.75
    assert lookups.rates("t")[bucket_of(4)] > 0.9
    for _ in range(50):
        lookups.learn("t", 4, 0)
    assert lookups.rates("t")[bucket_of(4)] < 0.2


def test_a_chain_that_ended_early_counts_as_rejected() -> None:
    """What its drafter had no confidence in would not have been accepted, or is at least not to be had."""
    acceptance = Acceptance(3)
    for i in range(200):
        drafts = Drafts()
        drafts.add(2, 3, 2) if i % 2 else drafts.add(3, 3, 3)
        acceptance.learn(i, "t", drafts)
    survival = acceptance.survival(-1, "t")
    assert survival[1] > 0.95
    assert survival[2] == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="cannot be"):
        Drafts().add(2, 4, 2)
