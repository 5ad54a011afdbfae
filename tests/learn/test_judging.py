"""The judge, what it counts, and the bets that it rests on."""

from __future__ import annotations

import numpy as np
import pytest
from learn_cases import some_record

from slipstream.errors import LearnError
from slipstream.learn.decisions.judge import OLDER, JudgeOptions, VersionJudge, judge
from slipstream.learn.learners.scoring import replayed
from slipstream.learn.records.served import Purpose
from slipstream.stats.betting import PairedTest


def test_an_answer_is_decoded_again_from_where_a_draft_is_right():
    hits = np.array([False, True, True, False, True, True, True, False], bool)
    once = replayed(hits, 2)  # 1 2 +3 | 4 5 +6 | 7x
    assert (once.num_tokens, once.num_steps, once.reached, once.accepted) == (7, 3, (3, 2), (2, 2))
    assert replayed(np.zeros(5, bool), 4).num_steps == 4
    assert replayed(np.ones(11, bool), 4).num_steps == 2


def test_a_paired_test_finds_a_mean_above_its_level_and_seldom_one_that_is_not():
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(100):
        test = PairedTest(0.95)
        for value in rng.choice([-0.5, 0.5], 200):
            test.add(float(value))
        alarms += test.rejects
    assert alarms <= 8
    test = PairedTest(0.99)
    for value in rng.normal(0.1, 0.2, 400).clip(-1, 1):
        test.add(float(value))
    assert test.rejects
    with pytest.raises(ValueError, match="at least -1"):
        test.add(-1.5)


def _judged(gains: dict[str, float], num: int = 120, seed: int = 0) -> VersionJudge:
    """A judge that saw `num` answers a group, with these chances that a draft token is right, 0.5 before."""
    rng, made = np.random.default_rng(seed), VersionJudge(JudgeOptions())
    for _ in range(num):
        for group, rate in gains.items():
            uniform = rng.random(80)
            made.add(group, replayed(uniform < rate, 4), replayed(uniform < 0.5, 4))
    return made


def test_a_better_candidate_passes_and_one_that_forgets_or_harms_a_task_does_not():
    assert _judged({"sql": 0.6, OLDER: 0.5}).verdict().better
    forgets = _judged({"sql": 0.7, OLDER: 0.45}).verdict()
    assert not forgets.better
    assert "older answers" in forgets.why
    harms = _judged({"sql": 0.8, "math": 0.4}).verdict()
    assert not harms.better
    assert "math" in harms.why
    assert "held-out" in _judged({"sql": 0.9}, num=3).verdict().why


def test_a_candidate_that_costs_more_than_it_gains_does_not_pass():
    made = VersionJudge(JudgeOptions(), candidate_cost=0.5, incumbent_cost=0.1)
    rng = np.random.default_rng(2)
    for _ in range(100):
        uniform = rng.random(80)
        made.add("sql", replayed(uniform < 0.6, 4), replayed(uniform < 0.5, 4))
    assert not made.verdict().better


def test_a_worse_or_an_equal_candidate_is_never_promoted_in_50_tries():
    assert not any(_judged({"sql": 0.45}, 40, seed).verdict().better for seed in range(50))
    assert not _judged({"sql": 0.5}).verdict().better


def test_records_that_a_learner_may_have_seen_judge_nothing():
    record = some_record(purpose=Purpose.TRAIN)
    with pytest.raises(LearnError, match="held-out"):
        judge(None, None, [record])  # type: ignore[arg-type]
