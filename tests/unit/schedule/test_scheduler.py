"""Scheduling without a model: fairness, bounds, preemption, drafts that never overrun."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepPlan
from slipstream.kv.segments import CHUNK, SegmentAccounting
from slipstream.sampling.params import SamplingParams
from slipstream.schedule.scheduler import MAX_SCORED_ROWS, Scheduler

ids = itertools.count()


def make(num_slots: int = 64 * CHUNK, **limits: int) -> tuple[Scheduler, SegmentAccounting]:
    accounting = SegmentAccounting(num_slots, move=lambda source, destination, count: None)
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_tokens_limit": 1000,
        "max_draft_tokens": 4,
    }
    return Scheduler(accounting, **{**options, **limits}), accounting


def sequence(length: int, max_tokens: int = 50, token: int | None = None, **fields: object) -> Sequence:
    number = next(ids)
    return Sequence(
        id=number,
        request_id=str(number),
        index=0,
        token_ids=[number if token is None else token] * length,
        num_prompt_tokens=length,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        **fields,  # type: ignore[arg-type]
    )


def run(plan: StepPlan, accounting: SegmentAccounting, accepted: int = 0) -> None:
    """What the engine does with a plan: compute the rows, accept some drafts, add the target's own token."""
    for item in plan.scheduled:
        seq = item.sequence
        if item.decodes:
            seq.token_ids.extend([seq.id] * (min(accepted, item.max_draft_tokens) + 1))
            kept = item.num_rows + min(accepted, item.max_draft_tokens)
        else:
            kept = item.num_rows
        accounting.commit(seq.id, seq.token_ids[seq.num_computed : seq.num_computed + kept])
        seq.num_computed += kept


def test_first_come_first_served_up_to_max_num_seqs() -> None:
    scheduler, _ = make(max_num_seqs=2)
    sequences = [sequence(5) for _ in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    plan = scheduler.plan()
    assert [item.sequence for item in plan.scheduled] == sequences[:2]
    scheduler.remove(sequences[0])
    assert sequences[2] in [item.sequence for item in scheduler.plan().scheduled]


def test_long_prompt_is_chunked_and_delays_nobody() -> None:
    scheduler, accounting = make()
    decoding = sequence(3)
    scheduler.add(decoding)
    run(scheduler.plan(), accounting)
    long, short = sequence(900), sequence(10)
    scheduler.add(long)
    scheduler.add(short)
    plan = scheduler.plan()
    rows = {item.sequence.id: item.num_rows for item in plan.scheduled}
    assert rows[decoding.id] == 1
    assert rows[short.id] == 10, "a short prompt is not kept waiting by a long one"
    assert 50 < rows[long.id] < 128
    assert sum(rows.values()) + sum(item.max_draft_tokens for item in plan.scheduled) <= 128


def test_a_step_never_holds_more_rows_than_allowed() -> None:
    scheduler, accounting = make(max_num_batched_tokens=20, max_num_seqs=50)
    for _ in range(50):
        scheduler.add(sequence(30))
    for _ in range(60):
        plan = scheduler.plan()
        total = sum(item.num_rows + item.max_draft_tokens for item in plan.scheduled)
        assert 0 < total <= 20
        assert all(item.num_rows >= 1 for item in plan.scheduled)
        run(plan, accounting)


@pytest.mark.parametrize(("max_tokens", "budget"), [(1, 0), (2, 1), (4, 3), (50, 4)])
def test_no_draft_beyond_max_tokens(max_tokens: int, budget: int) -> None:
    scheduler, _ = make()
    scheduler.add(sequence(3, max_tokens=max_tokens))
    assert scheduler.plan().scheduled[0].max_draft_tokens == budget


@pytest.mark.parametrize(("limit", "budget"), [(11, 0), (12, 1), (14, 3), (40, 4)])
def test_no_draft_beyond_the_context(limit: int, budget: int) -> None:
    scheduler, _ = make(num_tokens_limit=limit)
    scheduler.add(sequence(10))
    assert scheduler.plan().scheduled[0].max_draft_tokens == budget


@pytest.mark.parametrize(("asked", "budget"), [(None, 4), (0, 0), (2, 2), (9, 4)])
def test_a_request_may_ask_for_fewer_drafts(asked: int | None, budget: int) -> None:
    scheduler, _ = make()
    scheduler.add(sequence(10, options=RequestOptions(max_draft_tokens=asked)))
    assert scheduler.plan().scheduled[0].max_draft_tokens == budget


def test_followers_wait_for_their_leaders_prompt_and_reuse_it() -> None:
    scheduler, accounting = make()
    leader = sequence(100, token=7)
    follower = sequence(100, token=7, leader=leader)
    other = sequence(4)
    for seq in (leader, follower, other):
        scheduler.add(seq)
    plan = scheduler.plan()
    assert {item.sequence.id for item in plan.scheduled} == {leader.id, other.id}, "others are not held up"
    run(plan, accounting)
    scheduler.plan()
    assert follower.num_computed == 99
    assert follower.metrics.num_cached_tokens == 99


def test_full_cache_preempts_the_last_arrival_and_brings_it_back() -> None:
    scheduler, accounting = make(num_slots=4 * CHUNK)
    first, last = sequence(CHUNK + 20, 500), sequence(CHUNK + 20, 500)
    scheduler.add(first)
    scheduler.add(last)
    preempted = 0
    for _ in range(150):
        plan = scheduler.plan()
        preempted += len(plan.preempted)
        assert all(seq is last for seq in plan.preempted)
        assert all(item.sequence not in plan.preempted for item in plan.scheduled)
        run(plan, accounting)
    assert preempted >= 1
    assert last.metrics.num_preemptions == preempted
    assert last in scheduler.waiting
    first.finish_reason = FinishReason.STOP
    scheduler.remove(first)
    done = len(last.token_ids)
    for _ in range(20):
        run(scheduler.plan(), accounting)
    assert len(last.token_ids) > done


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_traffic_always_progresses_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    scheduler, accounting = make(
        num_slots=6 * CHUNK, max_num_batched_tokens=48, max_num_seqs=5, num_tokens_limit=200
    )
    live: list[Sequence] = []
    for step in range(400):
        if step < 100 and rng.random() < 0.4:
            seq = sequence(
                rng.randint(1, 150),
                rng.randint(1, 40),
                token=rng.randint(0, 2),
                options=RequestOptions(tenant=rng.choice("ab")),
            )
            live.append(seq)
            scheduler.add(seq)
        plan = scheduler.plan()
        assert plan.scheduled or not scheduler.has_work, "work was waiting and nothing ran"
        run(plan, accounting, accepted=rng.randint(0, 4))
        for seq in list(live):
            over = seq.num_output_tokens >= seq.params.max_tokens or len(seq.token_ids) >= 200
            if over or rng.random() < 0.01:
                seq.finish_reason = FinishReason.LENGTH
                scheduler.remove(seq)
                live.remove(seq)
        assert accounting.integrity() == []
        if step > 100 and not live:
            break
    assert not live, "every request ended"
    assert accounting.num_held == 0


def test_prompts_whose_log_probabilities_are_wanted_share_a_bounded_part_of_a_step() -> None:
    """Each of their rows has logits as wide as the vocabulary."""
    scheduler, accounting = make(max_num_batched_tokens=4096)
    scored = [sequence(900), sequence(40), sequence(500)]
    for one in scored:
        one.params = SamplingParams(prompt_logprobs=1, max_tokens=50)
    free = sequence(900)
    for one in (*scored, free):
        scheduler.add(one)
    plan = scheduler.plan()
    rows = {item.sequence.id: item.num_rows for item in plan.scheduled}
    assert rows[free.id] == 900
    assert sum(rows[one.id] for one in scored) == MAX_SCORED_ROWS
    assert [rows[one.id] for one in scored] == [108, 40, 108]
    run(plan, accounting)
    for _ in range(20):
        plan = scheduler.plan()
        waiting = [
            item for item in plan.scheduled if item.sequence in scored and item.sequence.num_pending > 1
        ]
        assert sum(item.num_rows for item in waiting) <= MAX_SCORED_ROWS
        run(plan, accounting)
    assert all(one.num_output_tokens for one in scored)


def test_drafted_steps_wait_for_their_draft_and_then_for_rows() -> None:
    """A sequence that awaits its draft has no rows; a whole step is checked at once or in a later pass."""
    scheduler, accounting = make(max_num_batched_tokens=64, max_draft_tokens=0)
    sequences = [sequence(5) for _ in range(3)]
    for each in sequences:
        scheduler.add(each)
    run(scheduler.plan(), accounting)
    first, second, third = sequences
    first.awaits_draft = True
    assert [item.sequence for item in scheduler.plan().scheduled] == [second, third]
    first.awaits_draft = False
    first.num_step_nodes = second.num_step_nodes = 40
    plan = scheduler.plan()
    assert [(item.sequence, item.max_draft_tokens) for item in plan.scheduled] == [(first, 40), (third, 0)]
    assert sum(item.num_rows + item.max_draft_tokens for item in plan.scheduled) <= 64
    first.num_step_nodes = 0
    assert [(item.sequence, item.max_draft_tokens) for item in scheduler.plan().scheduled] == [
        (first, 0), (second, 40), (third, 0)
    ]  # fmt: skip
