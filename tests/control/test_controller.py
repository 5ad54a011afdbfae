"""The controller in simulated worlds, whose best choice is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from world import FakeClock, Guesser, Machine, World, chain

from slipstream.control.budget import FIRST_TRIES
from slipstream.control.choice import MAX_TASKS, Asked, Member
from slipstream.control.controller import BOOKS_SHARE, MAX_HELD_STEPS, Controller
from slipstream.control.facts import Call, Outcome, StepFacts
from slipstream.control.realised import NUM_OFF_STEPS, Gain
from slipstream.control.step_cost import Drafted
from slipstream.draft.choice import NOBODY, NOTHING, Choice

FOREVER = 10**9


def steady(alpha: float, size: int, **changes: Any) -> World:
    """One task, requests without prompts that do not end, a dear and a cheap drafter."""
    guessers = [chain("good", {"t": alpha}), chain("cheap", {"t": 0.8 * alpha}, level_s=0.0004)]
    return World(guessers, size=size, tasks=("t",), prompt=0, answer=FOREVER, **changes)


def held(controller: Controller) -> dict[str, int]:
    """Entries of everything that is kept by request."""
    return {
        "chosen": len(controller._plan.chosen),
        "seen": sum(map(len, controller.known._seen)),
        "tries": len(controller.tries._last),
        "outcomes": len(controller.known._outcomes),
        "depths": len(controller.known._depths),
        "gone": len(controller.known._gone),
    }


# --- what is chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("alpha", [0.15, 0.6, 0.85])
def test_it_comes_near_the_best_fixed_choice(alpha: float, size: int) -> None:
    """Tries and probes included; where nothing pays, that is off."""
    world = steady(alpha, size).run(150)
    world.restart()
    world.run(200)
    assert world.rate > 0.97 * world.best_rate()
    assert world.rate > 0.98 * world.off_rate()


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_of_mixed_tasks_each_gets_its_own(size: int) -> None:
    guessers = [
        chain("a", {"sql": 0.85, "creative": 0.2}),
        chain("b", {"sql": 0.5, "creative": 0.3}, level_s=0.0004),
    ]
    world = World(guessers, size=size, tasks=("sql", "creative"), prompt=0, answer=FOREVER).run(150)
    world.restart()
    world.run(200)
    assert world.rate > 0.97 * world.best_rate()
    assert world.rate > 0.98 * world.off_rate()


def test_the_same_world_makes_the_same_choices() -> None:
    def choices() -> Iterator[list[Choice]]:
        world = steady(0.7, 4)
        for _ in range(60):
            world.step()
            yield world.choices

    assert list(choices()) == list(choices())


@pytest.mark.parametrize("size", [4, 32])
def test_where_nothing_pays_it_rests(size: int) -> None:
    """Not only nothing is drafted: nobody is even asked about, most of the time."""
    world = steady(0.05, size, clock=FakeClock(2e-3)).run(150)
    asked = 0
    choose = world.controller.choose

    def counting(*args: Any) -> list[Choice]:
        nonlocal asked
        asked += 1
        return choose(*args)

    world.controller.choose = counting  # type: ignore[method-assign,assignment]
    world.restart()
    world.run(300)
    assert world.rate > 0.98 * world.off_rate()
    assert asked < 200
    assert not world.controller.report().speculating


def test_it_wakes_when_the_load_changes() -> None:
    world = steady(0.85, 64, clock=FakeClock(4e-3)).run(150)
    while not world.controller._plan.is_nothing or world.controller._plan.held_s <= 0:
        world.step()
        assert world.num_steps < 1000
    assert world.controller._plan.is_nothing
    assert world.controller.repeats(64)
    world.running = world.running[:1]
    assert not world.controller.repeats(1)
    world.run(30)
    world.restart()
    world.run(100)
    assert world.rate > 1.5 * world.off_rate()


@pytest.mark.parametrize(("size", "row_s"), [(1, 0.002), (4, 0.002), (16, 0.0005)])
def test_a_shift_of_the_traffic_is_followed_and_back(size: int, row_s: float) -> None:
    """Clients that name no task: within 200 tokens a request the setting is right again."""
    guesser = chain("a", dict(alpha := {"": 0.85}))
    machine = Machine(row_s=row_s)
    world = World([guesser], size=size, tasks=("",), prompt=8, answer=60, one_by_one=True, machine=machine)
    world.run(200)
    assert isinstance(guesser.alpha, dict)
    for alpha[""] in (0.05, 0.85, 0.05, 0.85):
        guesser.alpha.update(alpha)
        world.restart()
        while world.tokens < 200 * size:
            world.step()
        world.restart()
        while world.tokens < 200 * size:
            world.step()
        assert world.rate > (0.95 if size < 16 else 0.93) * world.batch_best_rate(size), alpha


def test_a_dear_drafter_is_left_for_a_cheap_one() -> None:
    guessers = [chain("dear", {"t": 0.9}, level_s=0.05), chain("cheap", {"t": 0.6}, level_s=0.0005)]
    world = World(guessers, size=2, tasks=("t",), prompt=0, answer=FOREVER).run(100)
    assert {member for member, _ in world.chosen()} == {1}


@pytest.mark.parametrize("when", [0, 60])
def test_a_call_that_hung_once_is_got_over(when: int) -> None:
    """5 s in a world of 20 ms: the drafter is left, or not, and used again."""
    world, calls = steady(0.85, 4), 0

    def slow(member: int, seconds: float) -> float:
        nonlocal calls
        calls += member == 0
        return 5.0 if member == 0 and calls == when + 1 else seconds

    world.slowdown = slow
    world.run(80)
    assert calls > when
    world.restart()
    world.run(150)
    assert world.rate > 0.96 * world.best_rate()


def test_a_drafter_that_has_become_slow_is_left() -> None:
    world = steady(0.85, 4).run(100)
    world.slowdown = lambda member, seconds: seconds + 0.2
    world.run(60)
    world.restart()
    world.run(200)
    assert world.rate > 0.96 * world.off_rate()


def test_lookups_are_asked_first_and_short_guesses_are_not_taken() -> None:
    """Long guesses stand, and what they yield is more than what drafts would."""
    lookup = Guesser(
        Member("suffix", 8, False, True),
        {"t": 0.95},
        call_s=0.0001,
        level_s=0.0,
        slot_s=0.0,
        found={"t": [(0.5, 8)]},
    )
    world = World([lookup, chain("a", {"t": 0.6})], size=1, tasks=("t",), prompt=0, answer=FOREVER)
    world.run(200)
    [choice] = world.choices
    assert choice.lookup == 0
    world.restart()
    world.run(150)
    assert world.rate > 1.2 * world.best_rate()  # which drafts alone


def test_a_lookup_that_is_never_right_is_no_longer_asked() -> None:
    lookup = Guesser(Member("suffix", 8, False, True), {"t": 0.0}, found={"t": [(1.0, 4)]})
    world = World([lookup], size=4, tasks=("t",), prompt=0, answer=FOREVER).run(150)
    assert world.choices == [NOTHING] * 4


# --- what is spent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.85])
@pytest.mark.parametrize("share", [0.005, 0.03])
def test_tries_and_probes_cost_no_more_than_their_share(alpha: float, share: float) -> None:
    world = steady(alpha, 4, probe_share=share).run(1200)
    controller = world.controller
    first = FIRST_TRIES * world.machine.pass_s(1)
    assert controller.budget.spent_s <= share * controller.budget.total_s * 1.01 + first
    world.restart()
    world.run(200)
    assert world.rate > (0.98 - share) * max(world.best_rate(), world.off_rate())


def test_nothing_is_tried_or_probed_without_a_share_but_choices_adapt() -> None:
    world = steady(0.85, 1, probe_share=0.0).run(150)
    controller = world.controller
    assert controller.budget.spent_s == 0
    assert controller.realised.speedup() is None
    assert not controller.may_score(0)
    world.restart()
    world.run(60)
    assert world.rate > 0.95 * world.best_rate()
    for guesser in world.guessers:
        assert isinstance(guesser.alpha, dict)
        guesser.alpha["t"] = 0.02
    world.run(150)
    assert world.chosen() == [(NOBODY, 0)]
    assert world.controller.budget.spent_s == 0


def test_an_unknown_drafter_is_given_to_one_request() -> None:
    """Nobody knows what it costs, and all of them would have their text computed."""
    world = World([chain("a", {"t": 0.9}, missed_s=0.001)], size=16, tasks=("t",), prompt=500, answer=FOREVER)
    world.step()
    assert sum(member == 0 for member, _ in world.chosen()) == 1


def test_probes_measure_the_gain() -> None:
    world = steady(0.8, 4, probe_share=0.03, noise=0.02).run(1000)
    speedup = world.controller.realised.speedup()
    assert speedup is not None
    assert speedup.low < world.best_rate() / world.off_rate() * 1.02
    assert speedup.high > world.rate / world.off_rate()
    assert 0 < world.probing_s < 0.2 * world.seconds


def test_probes_report_nothing_where_prompts_always_arrive() -> None:
    """No step without prompts, no fair comparison; and none is paid for."""
    world = World([chain("a", {"t": 0.8})], size=8, tasks=("t",), prompt=32, answer=4, one_by_one=True)
    controller = world.controller
    for _ in range(300):
        if not world.waiting:
            world.waiting = [world._begin()]
        world.step()
        world.running = world.running[-8:]
        assert not controller.in_probe
    assert controller.realised.speedup() is None
    assert controller.report().realised is None


def test_a_probe_that_prompts_interrupt_is_given_up() -> None:
    world = steady(0.85, 4, probe_share=0.05).run(60)
    while not world.controller.in_probe:
        world.step()
    choices = world.controller.choose([world._asked(request) for request in world.running], 100)
    assert not world.controller.in_probe
    assert any(choice != NOTHING for choice in choices)
    assert world.controller.realised._probe == []


@pytest.mark.parametrize("alpha", [0.05, 0.85])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_books_are_kept_as_seldom_as_their_price_demands(alpha: float, share: float) -> None:
    """Where steps are short, deciding and learning may take a tenth of one."""
    world = steady(alpha, 4, books_s=share * Machine().step_s(4, 8)).run(300)
    world.restart()
    world.run(400)
    told = world.num_told / world.num_steps
    assert told * share < 4 * BOOKS_SHARE, "plans, tries and probes have their books too"
    assert told > 0.5 * BOOKS_SHARE / share, "or nothing new would be learned"
    assert world.rate > 0.96 * max(world.best_rate(), world.off_rate())


def test_with_books_that_cost_much_a_shift_is_followed() -> None:
    """Of several random worlds the usual one: when a shift is noticed there is a matter of a few looks."""
    shares: dict[float, list[float]] = {0.05: [], 0.85: []}
    for seed in range(5):
        world = steady(0.85, 4, books_s=0.1 * Machine().step_s(4, 8))
        world.random.seed(seed)
        world.run(300)
        for alpha in shares:
            for guesser in world.guessers:
                assert isinstance(guesser.alpha, dict)
                guesser.alpha["t"] = alpha
            world.run(400)
            world.restart()
            world.run(200)
            shares[alpha].append(world.rate / max(world.best_rate(), world.off_rate()))
    assert min(shares[0.05]) > 0.92
    assert median(shares[0.85]) > 0.92


def test_a_step_that_must_be_decided_anew_repeats_nothing() -> None:
    world = steady(0.85, 4, books_s=0.1 * Machine().step_s(4, 8)).run(300)
    controller = world.controller
    while controller._repeats < 2 or controller._plan.held_s <= 0 or controller.tries.under_way:
        world.step()
        assert world.num_steps < 1000
    assert not controller.repeats(1), "another load"
    assert controller.repeats(4)
    controller._plan.held_s = 0.0
    assert not controller.repeats(4), "the plan is over"


# --- what is allowed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_limits_are_kept(limit: int) -> None:
    world = steady(0.95, 4, limit=limit)
    for _ in range(80):
        world.step()
        assert all(depth <= limit for _, depth in world.chosen())
    assert (sum(world.num_asked) > 0) == (limit > 0)


def test_a_limit_that_falls_between_plans_is_kept() -> None:
    world = steady(0.95, 4).run(60)
    for limit in (8, 1, 0, 3):
        for request in world.running:
            request.limit = limit
        world.step()
        assert all(depth <= limit for _, depth in world.chosen())
        assert limit > 0 or world.choices == [NOTHING] * 4


@pytest.mark.parametrize("members", [frozenset({1}), frozenset()])
def test_only_members_that_may_are_asked(members: frozenset[int]) -> None:
    """By the caller's wish, or because the others have failed."""
    world = steady(0.9, 4, members=members)
    for _ in range(80):
        world.step()
        assert {member for member, _ in world.chosen()} <= members | {NOBODY}
    assert world.num_asked[0] == 0
    assert (world.num_asked[1] > 0) == (1 in members)


def test_a_drafter_that_fails_everyone_is_left_at_once() -> None:
    world = steady(0.9, 4).run(60)
    assert {member for member, _ in world.chosen()} == {0}
    for request in world.running:
        request.members = frozenset({1})
    world.restart()
    for _ in range(60):
        world.step()
        assert 0 not in {member for member, _ in world.chosen()}
    assert {member for member, _ in world.chosen()} == {1}


@pytest.mark.parametrize(("answer", "pays"), [(8, False), (1000, True)])
def test_short_answers_start_no_draft_model_on_long_prompts(answer: int, pays: bool) -> None:
    guesser = chain("model", {"t": 0.8}, missed_s=0.0005)
    world = World([guesser], size=4, tasks=("t",), prompt=400, answer=answer, one_by_one=True)
    world.run(400)
    begun = world.num_begun
    world.restart()
    world.run(400)
    begun = world.num_begun - begun
    assert begun > 50 or pays
    if pays:
        assert world.rate > 1.05 * world.off_rate()
    else:
        assert world.num_asked[0] < begun / 10


def test_a_prompt_is_announced_to_whom_will_draft() -> None:
    world = steady(0.85, 1).run(100)
    controller = world.controller
    assert controller.announce(77, "t", 50, 50, 500) == 0
    assert controller.announce(78, "never seen", 50, 50, 500) == 0  # as most are
    resting = steady(0.05, 4).run(100).controller
    assert resting.announce(77, "t", 50, 50, 500) == NOBODY


def test_text_seen_in_the_prompt_is_not_missed() -> None:
    controller = Controller([Member("a", 4, True)], adaptive=False, probe_share=0.0)
    controller.choose([Asked(1, "t", 4, 10)], 100)
    controller.announce(2, "t", 100, 100, 50)
    assert controller.known._num_missed == [100]
    controller.choose([Asked(1, "t", 4, 11), Asked(2, "t", 4, 101)], 0)
    controller.meet(0, 2, 101)
    assert controller.known._num_missed == [0]
    controller.meet(0, 1, 11)
    assert controller.known._num_missed == [10]


# --- without adapting ------------------------------------------------------------------------------------------


def test_fixed_everyone_is_drafted_for_as_deep_as_allowed() -> None:
    world = steady(0.05, 4, adaptive=False, probe_share=0.02, limit=5)
    probes = 0
    for _ in range(600):
        world.step()
        expected = [(NOBODY, 0)] * 4 if world.controller.in_probe else [(0, 5)] * 4
        assert world.chosen() == expected
        probes += world.controller.in_probe
    assert NUM_OFF_STEPS <= probes < 60
    assert probes % NUM_OFF_STEPS == 0 or world.controller.in_probe
    assert not world.controller.report().adaptive
    speedup = world.controller.realised.speedup()
    assert speedup is not None
    assert speedup.ratio == pytest.approx(world.fixed_rate({"t": (0, 5)}) / world.off_rate(), rel=0.1)


# --- what is remembered ----------------------------------------------------------------------------------------


def test_what_is_released_is_forgotten() -> None:
    world = World(
        [chain("a", {"t": 0.8}), chain("b", {"t": 0.5})],
        size=8,
        tasks=("t",),
        prompt=16,
        answer=20,
        one_by_one=True,
    )
    world.run(200)
    controller = world.controller
    assert controller.num_held <= 16
    for request in [*world.running, *world.waiting]:
        controller.release(request.sequence_id, request.task, request.output)
    assert controller.num_held == 0
    assert set(held(controller).values()) == {0}


def test_a_preempted_request_that_comes_back_is_not_forgotten_twice() -> None:
    """What its drafter saw of it before is lost, what it has seen since is not."""
    controller = Controller([Member("a", 4, True)], adaptive=False, probe_share=0.0)
    controller.choose([Asked(1, "t", 4, 100)], 0)
    controller.meet(0, 1, 100)
    controller.release(1, "t", None)
    controller.choose([], 100)
    controller.announce(1, "t", 100, 100, 50)
    assert controller.num_held == 1  # works in what was kept
    controller.choose([Asked(1, "t", 4, 101)], 0)
    controller.meet(0, 1, 101)
    assert controller.known._num_missed == [0]


def test_memory_is_bounded_by_what_runs() -> None:
    """Requests that are aborted before they have run, tasks by the thousand, long rests."""
    world = steady(0.05, 4).run(60)
    controller = world.controller
    for number in range(3000):
        controller.announce(10_000 + number, f"task {number}", 5, 5, 5)
        controller.release(10_000 + number, f"task {number}", 3)
    assert len(controller.known._lengths) <= MAX_TASKS
    assert len(controller.known._gone) < 300
    tasks = tuple(f"task {number}" for number in range(1000))
    alpha = dict.fromkeys(tasks, 0.5)
    world = World([chain("a", alpha)], size=4, tasks=tasks, prompt=4, answer=3).run(500)
    assert len(world.controller._plan.of_task) <= MAX_TASKS
    assert len(world.controller.known.tasks) <= MAX_TASKS
    assert max(held(world.controller).values()) <= 300


def test_how_long_answers_are_is_learned_by_task() -> None:
    controller = Controller([Member("a", 4, True)], adaptive=True, probe_share=0.0)
    for _ in range(50):
        controller.release(0, "long", 400)
        controller.release(0, "short", 5)
        controller.release(0, "short", None)
    assert controller.known.usual_length("long") == pytest.approx(400)
    assert controller.known.usual_length("short") == pytest.approx(5)
    assert 5 < controller.known.usual_length("unknown") < 400


# --- corner cases ----------------------------------------------------------------------------------------------


def facts(seconds: float, **changes: Any) -> StepFacts:
    outcome = Outcome(1, "t", 0, 2, 2, 2, 1, 2)
    values: dict[str, Any] = {
        "num_rows": 3,
        "num_others": 0,
        "undrafted_s": seconds,
        "calls": [Call(0, Drafted(1, 2, 2), 0.0)],
        "outcomes": [outcome],
        "num_drafted": 1,
        "num_checked": 2,
        "gains": [Gain("t", 2)],
    }
    return StepFacts(**(values | changes))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.filterwarnings("error")
def test_times_that_cannot_be_teach_nothing(seconds: float) -> None:
    world = steady(0.85, 4).run(100)
    controller = world.controller
    before = controller.known.cost.step_s(4, 8, 4, 4), controller.budget.total_s
    for _ in range(10):
        controller.learn(facts(seconds))
    assert (controller.known.cost.step_s(4, 8, 4, 4), controller.budget.total_s) == before
    world.restart()
    world.run(60)
    assert world.rate > 0.95 * world.best_rate()


@pytest.mark.parametrize("jump_s", [-1e4, 1e4])
def test_a_clock_that_jumps_fixes_no_plan_for_ever(jump_s: float) -> None:
    clock = FakeClock()
    world = steady(0.85, 4, clock=clock).run(100)
    plans = 0
    replan = world.controller._replan

    def jumping(*asked: Any) -> None:
        nonlocal plans
        plans += 1
        tick, clock.tick_s = clock.tick_s, jump_s
        replan(*asked)
        clock.tick_s = tick

    world.controller._replan = jumping  # type: ignore[method-assign]
    world.run(4 * MAX_HELD_STEPS)
    assert plans >= 3


def test_empty_batches_and_strange_names_do_not_raise() -> None:
    controller = Controller([Member("a", 4, True)], adaptive=True, probe_share=0.01, pass_s=lambda rows: 0.02)
    assert controller.choose([], 0) == []
    assert not controller.repeats(0)
    controller.learn(facts(0.02, calls=[], outcomes=[], gains=[], num_drafted=0, num_checked=0, num_rows=64))
    assert controller.choose([], 64) == []
    assert controller.report().tasks == ()
    assert controller.report().estimated_speedup is None
    assert len(controller.choose([Asked(1, "\u2603" * 1000, 3)], 0)) == 1
    controller.release(999, "unheard of", None)
    controller.release(999, "unheard of", 0)
    assert controller.choose([Asked(2, "", 0, members=frozenset())], 0) == [NOTHING]


def test_a_report_says_what_is_going_on() -> None:
    world = steady(0.85, 4, probe_share=0.02).run(600)
    report = world.controller.report([3, 0], [False, True])
    assert report.adaptive
    assert report.speculating
    assert report.probe_share < 0.03
    assert report.estimated_speedup == pytest.approx(world.best_rate() / world.off_rate(), rel=0.1)
    [task] = report.tasks
    assert task.method == "good"
    assert task.acceptance_rate is not None
    assert task.acceptance_length is not None
    assert task.acceptance_length == pytest.approx(1 + task.acceptance_rate * task.depth, rel=0.2)
    assert [method.num_failures for method in report.methods] == [3, 0]
    assert [method.retired for method in report.methods] == [False, True]
    assert report.methods[0].survival[0] == pytest.approx(0.85, abs=0.08)
    assert dict(report.depth_by_batch)[4] == pytest.approx(world.chosen()[0][1], abs=1.5)


def test_each_task_has_an_estimate_of_its_own() -> None:
    guesser = chain("a", {"sql": 0.9, "creative": 0.05})
    world = World([guesser], size=4, tasks=("sql", "creative"), prompt=0, answer=FOREVER).run(200)
    estimates = {task.task: task.estimated_speedup for task in world.controller.report().tasks}
    assert estimates["sql"] is not None
    assert estimates["creative"] is not None
    assert estimates["sql"] > 1.5
    assert estimates["creative"] < 1.0, "it waits for the drafts of the others"


def test_break_even_is_where_one_token_pays() -> None:
    machine = Machine(read_s=0.02, row_s=0.0)
    world = steady(0.85, 1, machine=machine).run(200)
    [task] = world.controller.report().tasks
    assert task.break_even == pytest.approx(0.0016 / 0.0211, abs=0.03)


@pytest.mark.parametrize("limit", [4, 0])
def test_a_step_in_which_no_drafter_had_a_guess_is_speculations_too(limit: int) -> None:
    """The realised speedup is that of all steps in which drafts were allowed, not of the lucky ones."""
    controller = Controller([Member("a", 4, True)], adaptive=False, probe_share=0.0)
    controller.choose([Asked(0, "t", limit, length=10)], 0)
    facts = StepFacts(
        num_rows=1,
        num_others=0,
        undrafted_s=0.01,
        calls=[],
        outcomes=[],
        num_drafted=0,
        num_checked=0,
        gains=[Gain("t", 1)],
    )
    controller.learn(facts)
    assert [step.speculates for step in controller.realised._before] == [limit > 0]
