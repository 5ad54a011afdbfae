"""What was decided: for whom it holds, how long, and when it is recalled."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from slipstream.control.acceptance import length_class
from slipstream.control.plans import MAX_AGE, Plan, load_bucket
from slipstream.control.policy import SEARCH_SHARE, Policy
from slipstream.control.report import control_report
from slipstream.control.types import (
    MAX_TASKS,
    NO_DRAFTER,
    NOTHING,
    Choice,
    DraftCall,
    PolicyDrafter,
    StepRequest,
)
from slipstream.core.bounded import BoundedDict
from tests.control.world import PLAN_S, FakeClock, drafted

DEEP, SHALLOW = Choice(0, 4), Choice(0, 1)
STEP_S = 0.002
LOADS = (1, 2, 4, 8, 16, 32)


LOOKUP = PolicyDrafter("suffix", 8, is_chain=False, looks_up=True)
CHAIN = PolicyDrafter("a", 4, is_chain=True)


def requests(number: int, task: str = "t") -> list[StepRequest]:
    return [StepRequest(sequence_id, task, limit=8, length=100) for sequence_id in range(number)]


def observe(
    policy: Policy,
    seen: Seq[StepRequest],
    seconds: float,
    *,
    calls: Seq[DraftCall] = (),
    num_prompt_rows: int = 0,
) -> None:
    """A step that took so long beside its `calls`."""
    rows = len(seen) + num_prompt_rows
    policy.observe(
        seen, calls, num_rows=rows, num_prompt_rows=num_prompt_rows, num_checked=0, undrafted_s=seconds
    )


def make(traits: PolicyDrafter = LOOKUP, pass_s: Callable[[float], float] = lambda rows: STEP_S) -> Policy:
    return Policy([traits], adaptive=True, probe_share=0.0, pass_s=pass_s, clock=FakeClock())


def test_loads_of_one_bucket_are_alike() -> None:
    for number in range(1, 500):
        bucket = load_bucket(number)
        assert bucket <= load_bucket(number + 1)
        assert load_bucket(number) < load_bucket(math.ceil(1.2 * number)), "no more than a fifth"


def test_a_plan_goes_by_request_then_by_task_then_by_most() -> None:
    plan = Plan(usual=NOTHING, by_sequence={1: SHALLOW}, by_task={"a": DEEP, "b": SHALLOW})
    assert plan.choice(StepRequest(1, "a", 8)) == SHALLOW
    assert plan.choice(StepRequest(99, "a", 8)) == DEEP
    assert plan.choice(StepRequest(99, "b", 8)) == DEEP, "what it was given it keeps"
    assert plan.choice(StepRequest(98, "b", 8)) == SHALLOW
    assert plan.choice(StepRequest(97, "never seen", 8)) == NOTHING


def test_a_plan_goes_by_the_length_of_a_text_before_its_task() -> None:
    plan = Plan(usual=NOTHING, by_task=BoundedDict(4), by_length=BoundedDict(4))
    plan.by_task["a"], plan.by_length["a", length_class(5000)] = DEEP, NOTHING
    assert plan.choice(StepRequest(1, "a", 8, length=100)) == DEEP
    assert plan.choice(StepRequest(2, "a", 8, length=5000)) == NOTHING


def test_a_new_plan_keeps_what_was_found_for_tasks_that_are_not_there() -> None:
    policy = make(pass_s=lambda rows: STEP_S * (1 + 0.1 * rows))
    for task, accepted in [("good", 1), ("bad", 0)]:
        for _ in range(200):
            policy.score(0, task, 1, accepted)
    policy.choose(requests(4, "good"), 0)
    observe(policy, requests(4), 1.0)
    for _ in range(2 * MAX_AGE):
        choices = policy.choose(requests(4, "bad"), 0)
        observe(policy, requests(4), STEP_S)
    assert choices == [NOTHING] * 4
    late = [*requests(3, "bad"), StepRequest(50, "good", limit=8, length=100)]
    assert [choice.drafts for choice in policy.choose(late, 0)] == [False, False, False, True]


def test_tasks_are_bounded() -> None:
    policy = make()
    for number in range(2 * MAX_TASKS):
        task = [StepRequest(number, f"task {number}", limit=8)]
        policy.choose([*task, *requests(number % 3)], 0)
        observe(policy, requests(1 + number % 3), 10.0)
        policy.release(number, f"task {number}", 5)
    assert policy.num_held <= 3
    assert policy.traffic.usual_length("task 0") == pytest.approx(5)
    assert len(control_report(policy).tasks) <= MAX_TASKS


def test_a_load_that_comes_back_needs_no_new_search_until_its_plan_is_old() -> None:
    policy = make()
    searches: list[int] = []
    num_steps = 3000
    for turn in range(num_steps):
        number = LOADS[turn % len(LOADS)]
        policy.choose(requests(number), 0)
        if policy.planning_s > 0:
            searches.append(number)
        observe(policy, requests(number), STEP_S)
    assert set(searches) == set(LOADS)
    by_time = num_steps * STEP_S * SEARCH_SHARE / PLAN_S
    by_age = len(LOADS) * num_steps / MAX_AGE
    assert 0.5 * by_time < len(searches) < len(LOADS) + by_time + 1.2 * by_age
    assert min(searches.count(number) for number in LOADS) >= 0.5 * num_steps / MAX_AGE


def test_nobody_is_given_a_drafter_that_must_read_a_long_text_for_little() -> None:
    for unseen, begins in [(8, True), (4000, False)]:
        policy = make(CHAIN)
        for number in range(1, 9):  # a token of text takes a tenth of a step
            for missed in (0, 100):
                for each in range(number):
                    policy.note_called(0, 1000 * number + missed + each, missed)
                call_s = 1e-5 + 0.1 * STEP_S * max(missed - 1, 0) * number
                call = DraftCall(number, 2, 2 * number, 0, call_s)
                observe(policy, requests(number), STEP_S, calls=[call])
                policy.choose([], 0)
        found = [StepRequest(number, "t", limit=8, length=unseen, num_output=60) for number in range(4)]
        choices = policy.choose(found, 0)
        assert all(choice.drafts == begins for choice in choices)


def test_requests_that_are_over_are_forgotten_by_every_plan() -> None:
    policy = make()
    for number in LOADS:
        policy.choose(requests(number), 0)
    assert policy.num_held == 32
    for sequence_id in range(32):
        policy.release(sequence_id, "t", 10)
    assert policy.num_held == 0


def test_steps_with_prompts_have_plans_of_their_own() -> None:
    """Alone, rows are next to free until 16; beside a prompt each of them takes its time."""
    policy = make(pass_s=lambda rows: STEP_S * max(1.0, rows / 16))
    for number in range(200):
        policy.score(0, "t", 1, int(number % 3 == 0))
    for turn in range(40):
        num_prompt_rows = 64 * (turn % 2)
        choices = policy.choose(requests(8), num_prompt_rows)
        assert all((choice == NOTHING) == (num_prompt_rows > 0) for choice in choices), turn
        seconds = STEP_S * max(1.0, (8 + num_prompt_rows) / 16)
        observe(policy, requests(8), seconds, num_prompt_rows=num_prompt_rows)
    gain = control_report(policy).estimated_speedup
    assert gain is not None
    assert gain > 1.1


def test_a_task_for_which_drafts_pay_is_drafted_for_where_nobody_else_is() -> None:
    policy = make(pass_s=lambda rows: STEP_S * (1 + 0.1 * rows))
    for task, accepted in [("good", 1), ("bad", 0)]:
        for _ in range(200):
            policy.score(0, task, 1, accepted)
    for found in ("good", "bad"):
        for _ in range(2 * MAX_AGE):
            choices = policy.choose(requests(4, found), 0)
            observe(policy, requests(4), STEP_S)
    assert choices == [NOTHING] * 4
    arrived = StepRequest(99, "good", limit=8, length=100)
    assert [choice.drafts for choice in policy.choose([*requests(3, "bad"), arrived], 0)] == [False] * 3 + [
        True
    ]
    assert policy.planning_s == 0, "without another search"


def test_prompts_are_begun_by_whom_the_plan_names() -> None:
    policy = make(CHAIN)
    arriving = StepRequest(1, "t", limit=0, length=16)
    assert policy.announce(arriving, 16, 16, 100) == NO_DRAFTER, "nothing is known"
    for _ in range(60):
        [choice] = policy.choose(requests(1), 0)
        depth = choice.depth
        calls = [DraftCall(1, depth, depth, 0, 1e-5)] if choice.drafts else []
        observe(policy, [drafted(0, depth, depth)] if calls else requests(1), STEP_S, calls=calls)
    assert policy.announce(arriving, 16, 16, 100) == 0
    assert policy.announce(replace(arriving, allowed=frozenset()), 16, 16, 100) == NO_DRAFTER, "it may not"


def test_a_plan_for_those_who_may_have_drafts_is_for_the_whole_step() -> None:
    """Where prompts take all the room, nobody may have drafts; that is no plan for the next step."""
    policy = make()
    limited = [StepRequest(0, "t", limit=0, length=100), *requests(4)[1:]]
    assert [choice.drafts for choice in policy.choose(limited, 64)] == [False, True, True, True]
    policy = make()
    crowded = [replace(request, limit=0) for request in requests(4)]
    assert policy.choose(crowded, 64) == [NOTHING] * 4
    assert all(choice.drafts for choice in policy.choose(requests(4), 64))


def test_requests_that_may_have_no_drafts_say_nothing_of_the_others() -> None:
    """Three forbid drafts, or have no room for them in this step; the plan is kept for what comes next."""
    policy = make()
    able = requests(4)
    choices = policy.choose([able[0], *(replace(request, limit=0) for request in able[1:])], 0)
    assert [choice.drafts for choice in choices] == [True, False, False, False]
    observe(policy, requests(4), STEP_S)
    assert all(choice.drafts for choice in policy.choose(able, 0)), "as soon as there is room"
    others = [StepRequest(50 + number, task, limit=8) for number, task in enumerate(["t", "new", "t", "new"])]
    assert all(choice.drafts for choice in policy.choose(others, 0))
    assert policy.planning_s == 0, "without another search"


def test_whether_a_prompt_pays_is_decided_by_the_whole_of_it() -> None:
    """A chunk of it is computed in a step; a drafter that began would have to compute the rest too."""
    policy = make(CHAIN)
    for number in range(1, 40):
        policy.note_called(0, number, number % 5 * 100)
        call = DraftCall(1, 4, 4, 0, 1e-5 + 0.1 * STEP_S * max(number % 5 * 100 - 1, 0))
        observe(policy, [drafted(number, 4, 4)], STEP_S, calls=[call])
        policy.choose(requests(1), 0)
    short, long = (StepRequest(1000, "t", limit=0, length=length) for length in (16, 16_000))
    assert policy.announce(short, 16, 16, 100) == 0
    assert policy.announce(long, 16, 16, 100) == NO_DRAFTER


def test_a_fixed_drafter_is_not_scored() -> None:
    """What a lookup is worth decides nothing where it always drafts: its calls would be spent on nothing."""
    for adaptive in (True, False):
        policy = Policy([LOOKUP], adaptive=adaptive, probe_share=0.1, pass_s=lambda rows: STEP_S)
        policy.choose(requests(1), 0)
        observe(policy, requests(1), STEP_S)
        assert policy.may_score(0) == adaptive


def test_beside_prompts_only_drafters_of_the_other_steps_are_asked() -> None:
    """One that is asked in few steps only would have to compute what it missed each time."""
    for alone_pays in (True, False):
        policy = make(CHAIN, pass_s=lambda rows: STEP_S * (1 + 0.01 * rows))
        policy.draft_costs[0].learn(DraftCall(1, 1, 1, seconds=1e-5), 0)
        for _ in range(2):
            policy.draft_costs[0].learn(DraftCall(1, 2, 2, seconds=1e-5), 0)
        limit = 8 if alone_pays else 0
        choices = policy.choose([replace(request, limit=limit) for request in requests(4)], 0)
        assert [choice.drafts for choice in choices] == [alone_pays] * 4
        assert [choice.drafts for choice in policy.choose(requests(4), 1)] == [alone_pays] * 4


def test_a_change_of_acceptance_is_followed_whatever_searches_cost() -> None:
    """This one took so long that no other is due for long; outcomes are kept for some steps before they are learned."""
    clock = FakeClock(50 * STEP_S)
    policy = Policy(
        [CHAIN], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S * rows**0.5, clock=clock
    )
    before, after = 0, 0
    for turn in range(240):
        [choice] = policy.choose(requests(1), 0)
        accepted = choice.depth if turn < 100 else 0
        before += choice.drafts and 50 <= turn < 100
        after += choice.drafts and turn >= 200
        calls = [DraftCall(1, choice.depth, choice.depth, 0, 1e-5)] if choice.drafts else []
        seen = [drafted(0, choice.depth, accepted)] if choice.drafts else requests(1)
        observe(policy, seen, STEP_S * (1 + choice.depth) ** 0.5, calls=calls)
    assert before > 40, "as soon as the cost is known"
    assert after < 10
