"""What was decided: for whom it holds, how long, and when it is recalled."""

from __future__ import annotations

import pytest

from slipstream.control.choice import MAX_TASKS, Asked, Member
from slipstream.control.controller import PLAN_SHARE, RECALLED, Controller
from slipstream.control.facts import StepFacts
from slipstream.control.realised import Gain
from slipstream.control.standing import Standing, load_level
from slipstream.draft.choice import NOTHING, Choice
from tests.control.world import PLAN_S, FakeClock

DEEP, SHALLOW = Choice(0, 4), Choice(0, 1)
STEP_S = 0.002
LOADS = (1, 2, 4, 8, 16, 32)


def asked(number: int, task: str = "t") -> list[Asked]:
    return [Asked(sequence_id, task, limit=8, length=100) for sequence_id in range(number)]


@pytest.mark.parametrize(
    ("made_for", "load", "holds"),
    [
        (1, 1, True),
        (1, 2, False),
        (4, 5, True),
        (4, 3, False),
        (10, 12, True),
        (10, 13, False),
        (10, 7, False),
    ],
)
def test_a_plan_is_for_its_load(made_for: int, load: int, holds: bool) -> None:
    assert Standing(NOTHING, 1.0, num_requests=made_for).is_for(load, beside_prompts=False) == holds
    assert not Standing(NOTHING, 1.0, num_requests=made_for).is_for(load, beside_prompts=True)


def test_loads_of_one_level_are_alike() -> None:
    for number in range(1, 500):
        level = load_level(number)
        assert level <= load_level(number + 1)
        if load_level(number + 1) == level:
            assert Standing(NOTHING, 1.0, num_requests=number).is_for(number + 1, beside_prompts=False)


def test_what_is_decided_goes_by_request_then_by_task_then_by_most() -> None:
    plan = Standing(NOTHING, 1.0)
    requests = [*asked(3, "a"), Asked(7, "b", limit=8), Asked(8, "b", limit=8)]
    plan.decide(requests, [DEEP, SHALLOW, DEEP, SHALLOW, SHALLOW], [1.0, 2.0, 3.0, 4.0, 6.0])
    assert plan.choice(1, "a") == SHALLOW
    assert plan.choice(99, "a") == DEEP
    assert plan.choice(99, "b") == plan.choice(99, "never seen") == SHALLOW
    assert plan.gains == {"a": pytest.approx(2.0), "b": pytest.approx(5.0)}


def test_a_plan_that_is_recalled_learns_of_tasks_and_leaves_the_other_as_it_was() -> None:
    now, recalled = Standing(NOTHING, 1.0), Standing(NOTHING, 1.0)
    now.decide([Asked(1, "new", limit=8), Asked(2, "both", limit=8)], [DEEP, DEEP], [2.0, 3.0])
    recalled.decide([Asked(1, "old", limit=8), Asked(2, "both", limit=8)], [SHALLOW, SHALLOW], [1.0, 1.5])
    recalled.take_over(now)
    assert list(recalled.of_task.items()) == [("old", SHALLOW), ("new", DEEP), ("both", SHALLOW)], (
        "oldest first"
    )
    assert recalled.gains == {"new": 2.0, "both": 1.5, "old": 1.0}
    assert now.of_task == {"new": DEEP, "both": DEEP}


def test_tasks_are_bounded() -> None:
    plan = Standing(NOTHING, 1.0)
    for number in range(2 * MAX_TASKS):
        plan.decide([Asked(number, f"task {number}", limit=8)], [DEEP], [1.0])
    assert len(plan.of_task) == len(plan.gains) == MAX_TASKS
    assert f"task {2 * MAX_TASKS - 1}" in plan.of_task


def test_a_load_that_comes_back_needs_no_new_plan_until_that_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Member("suffix", 8, is_chain=False, looks_up=True)
    controller = Controller(
        [lookup], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S, clock=FakeClock()
    )
    plans: list[int] = []
    replan = controller._replan
    monkeypatch.setattr(
        controller, "_replan", lambda asked, *load: (plans.append(len(asked)), replan(asked, *load))
    )
    num_steps = 2000
    for step in range(num_steps):
        number = LOADS[step % len(LOADS)]
        controller.choose(asked(number), 0)
        gains = [Gain("t", 1)] * number
        controller.learn(StepFacts(number, 0, STEP_S, [], [], 0, 0, gains))
    assert set(plans) == set(LOADS)
    # A plan that is made for one step in six gets too old long before it has held as long as it may.
    expected = num_steps * STEP_S / (RECALLED * PLAN_S / PLAN_SHARE)
    for number in LOADS:
        assert 0.8 * expected < plans.count(number) < 1.2 * expected


def test_nobody_is_given_a_drafter_that_must_read_a_long_text_first() -> None:
    """The plan of a load that comes back was made for requests whose texts were known."""
    chain = Member("a", 4, is_chain=True)
    controller = Controller(
        [chain], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S, clock=FakeClock()
    )
    controller.known.begin_step()
    plan = Standing(DEEP, held_s=9.0, until_s=9.0, num_requests=4)
    for unseen, recalled in [(8, True), (4000, False)]:
        controller._plan, controller._by_load = Standing(NOTHING, 9.0, num_requests=16), {(1, False): plan}
        requests = [Asked(number, "t", limit=8, length=unseen, num_output=9) for number in range(4)]
        controller._recall(requests, beside_prompts=False)
        assert (controller._plan is plan) == recalled


def test_requests_that_are_over_are_forgotten_by_every_plan() -> None:
    lookup = Member("suffix", 8, is_chain=False, looks_up=True)
    controller = Controller([lookup], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S)
    for number in LOADS:
        controller.choose(asked(number), 0)
    assert controller.num_held == 32
    for sequence_id in range(32):
        controller.release(sequence_id, "t", 10)
    assert controller.num_held == 0


def test_steps_with_prompts_have_plans_of_their_own() -> None:
    """Alone, rows are next to free until 16; beside a prompt each of them takes its time."""
    lookup = Member("suffix", 8, is_chain=False, looks_up=True)
    controller = Controller(
        [lookup],
        adaptive=True,
        probe_share=0.0,
        pass_s=lambda rows: STEP_S * max(1.0, rows / 16),
        clock=FakeClock(),
    )
    for number in range(200):
        controller.score(0, "t", 1, int(number % 3 == 0))
    for step in range(40):
        num_prompt_rows = 64 * (step % 2)
        choices = controller.choose(asked(8), num_prompt_rows)
        assert all((choice == NOTHING) == (num_prompt_rows > 0) for choice in choices), step
        seconds = STEP_S * max(1.0, (8 + num_prompt_rows) / 16)
        gains = [Gain("t", 1)] * 8
        controller.learn(StepFacts(8 + num_prompt_rows, num_prompt_rows, seconds, [], [], 0, 0, gains))
    assert controller.report().estimated_speedup > 1.1


def test_where_nobody_is_drafted_for_prompts_are_no_reason_to_ask_again() -> None:
    lookup = Member("suffix", 8, is_chain=False, looks_up=True)
    controller = Controller(
        [lookup], adaptive=True, probe_share=0.0, pass_s=lambda rows: 1e-5 * rows, clock=FakeClock()
    )
    for _ in range(200):
        controller.score(0, "t", 1, 0)  # never right
    for num_prompt_rows in (0, 64) * 3:  # until it is known what steps take, plans are short
        controller.choose(asked(8), num_prompt_rows)
        rows = 8 + num_prompt_rows
        controller.learn(StepFacts(rows, num_prompt_rows, 1e-5 * rows, [], [], 0, 0, [Gain("t", 1)] * 8))
    for num_prompt_rows in (0, 64, 64, 0):
        assert controller.repeats(8, num_prompt_rows > 0)
        assert controller.rests
    assert not controller.repeats(64, True), "another load"
    for plan in (controller._alone, controller._beside):
        plan.is_nothing = False
        assert not controller.repeats(8, True), "somebody may have to begin with a prompt, or is drafted for"
        plan.is_nothing = True
    assert controller.repeats(8, True)


def test_prompts_are_begun_by_whom_the_plan_in_force_names_where_the_other_is_old() -> None:
    chain = Member("a", 4, is_chain=True)
    controller = Controller([chain], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S)
    controller._hold(Standing(DEEP, held_s=1.0, until_s=1.0, num_requests=4, beside_prompts=True))
    assert controller.announce(1, "t", 16, 16, 100) == 0, "there was no plan for steps alone yet"
    controller._hold(Standing(NOTHING, held_s=1.0, until_s=1.0, num_requests=4))
    assert controller.announce(2, "t", 16, 16, 100) == -1


def test_a_plan_for_those_who_may_have_drafts_is_for_the_whole_step() -> None:
    lookup = Member("suffix", 8, is_chain=False, looks_up=True)
    controller = Controller([lookup], adaptive=True, probe_share=0.0, pass_s=lambda rows: STEP_S)
    limited = [Asked(0, "t", limit=0, length=100), *asked(4)[1:]]
    controller.choose(limited, 64)
    assert controller._plan.num_requests == 4
    assert controller._plan.is_for(4, beside_prompts=True)
