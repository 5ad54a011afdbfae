"""The loop offline on a trace."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.engine.factory import make_engine
from slipstream.errors import LearnError
from slipstream.learn.capture.traces import asked_trace
from slipstream.learn.decisions.replay import ReplayOptions, replay
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.records.selection import judging_parts, older_records, training_parts
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.sampling.params import SamplingParams

BASE = BaseDraft(EMBEDDED_DRAFT)


def test_a_trace_is_answered_in_order_with_the_rows_of_every_token():
    questions = [
        (one["task"], [{"role": "user", "content": one["messages"][0]["content"]}])
        for one in sample_prompts()[:6]
    ]
    engine = make_engine(None, None, {"max_num_seqs": 8})
    seen: list[int] = []
    params = SamplingParams(temperature=0, max_tokens=12)
    records = asked_trace(engine, questions, params, lambda done, _: seen.append(done))
    assert [one.task for one in records] == [task for task, _ in questions]
    assert seen[-1] == 6
    assert engine.on_checked is None
    for one in records:
        assert (one.rows.top_ids[one.rows.path_lengths() == 0, 0] == one.token_ids).all()
    report = replay(
        records, make_learner("corrective", BASE, LearnerOptions(num_steps=2)), ReplayOptions(every=3)
    )
    assert report.num_requests == 6
    assert [one.after for one in report.rounds] == [0, 3]
    assert report.gain == 0
    assert set(report.base) == {"all", *(task for task, _ in questions)}


def test_older_records_are_spread_over_tasks():
    records = [
        ServedRecord(
            f"{number}", "m", "t", np.zeros(1, np.int32), np.zeros(1, np.int32), task="a" if number else "b"
        )
        for number in range(20)
    ]
    assert sorted(one.task for one in older_records(records, Purpose.TRAIN, 3)) == ["a", "a", "b"]
    assert not older_records(records, Purpose.JUDGE, 3)


def a_record(number: int, purpose: Purpose) -> ServedRecord:
    none = np.zeros(1, np.int32)
    return ServedRecord(
        f"{number}", "m", "t", none, none, purpose=purpose, task="ab"[number % 2], number=number
    )


def test_there_are_older_records_of_all_tasks_from_the_first_candidate_on():
    records = [a_record(number, (Purpose.JUDGE, Purpose.TRAIN)[number % 5 > 0]) for number in range(100)]
    latest, older = training_parts(records, 8, 6)
    assert [one.number for one in latest] == [91, 92, 93, 94, 96, 97, 98, 99]
    assert sorted(one.task for one in older) == ["a"] * 3 + ["b"] * 3
    assert all(one.purpose is Purpose.TRAIN for one in (*latest, *older))
    everything, older = training_parts(records, 100, 6)
    assert (len(everything), len(older)) == (80, 6)
    assert training_parts(records, 8, 6, 1) != training_parts(records, 8, 6, 2)
    assert training_parts([], 8, 6) == ([], [])


def test_the_latest_held_out_answers_are_judged_and_older_ones_are_the_holdout():
    records = [a_record(number, (Purpose.JUDGE, Purpose.TRAIN)[number % 5 > 0]) for number in range(100)]
    latest, older = judging_parts(records, 8, 6, least=12)
    assert [one.number for one in latest] == [*range(60, 100, 5)]
    assert len({one.number for one in older}) == 6
    assert {one.number for one in older} <= {*range(0, 60, 5)}
    assert sorted(one.task for one in older) == ["a"] * 3 + ["b"] * 3
    assert [len(part) for part in judging_parts(records, 100, 6, least=1)] == [20, 0]
    assert [len(part) for part in judging_parts(records, 0, 6, least=20)] == [0, 6]
    latest, older = judging_parts(records, 8, 6, least=13)
    assert [one.number for one in latest] == [*range(0, 100, 5)], "too few are no holdout, and judged on"
    assert older == []


def test_an_empty_trace_says_so():
    with pytest.raises(LearnError, match="holds no answer"):
        replay([], make_learner("whole", BASE, LearnerOptions()))
