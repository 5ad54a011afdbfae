"""The policy in simulated worlds, whose best choice is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
from world import PLAN_S, FakeClock, Machine, Simulated, World, chain, drafted

from slipstream.control.plans import MAX_AGE
from slipstream.control.policy import SEARCH_SHARE, Policy
from slipstream.control.realised import NUM_OFF_STEPS
from slipstream.control.report import control_report
from slipstream.control.trials import MAX_TRIAL_STEPS
from slipstream.control.types import (
    MAX_TASKS,
    NO_DRAFTER,
    NOTHING,
    Choice,
    DraftCall,
    PolicyDrafter,
    StepRequest,
)

FOREVER = 10**9


def steady(alpha: float, size: int, **changes: Any) -> World:
    """One task, requests without prompts that do not end, a dear and a cheap drafter."""
    drafters = [chain("good", {"t": alpha}), chain("cheap", {"t": 0.8 * alpha}, level_s=0.0004)]
    return World(drafters, size=size, tasks=("t",), prompt=0, answer=FOREVER, **changes)


# --- what is chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("alpha", [0.15, 0.6, 0.85])
def test_it_comes_near_the_best_fixed_choice(alpha: float, size: int) -> None:
    """Trials and probes included; where nothing pays, that is off."""
    world = steady(alpha, size).run(150)
    world.restart()
    world.run(200)
    assert world.rate > 0.97 * world.best_rate()
    assert world.rate > 0.98 * world.off_rate()


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_of_mixed_tasks_each_gets_its_own(size: int) -> None:
    drafters = [
        chain("a", {"sql": 0.85, "creative": 0.2}),
        chain("b", {"sql": 0.5, "creative": 0.3}, level_s=0.0004),
    ]
    world = World(drafters, size=size, tasks=("sql", "creative"), prompt=0, answer=FOREVER).run(150)
    world.restart()
    world.run(200)
    assert world.rate > 0.97 * world.best_rate()
    assert world.rate > 0.98 * world.off_rate()


@pytest.mark.parametrize("size", [1, 4])
def test_a_head_that_fades_behind_long_texts_drafts_for_short_ones(size: int) -> None:
    """Requests that have just begun are drafted for as those of their length were."""
    head = replace(chain("head", {"t": 0.8}), fades_behind=2048)
    world = World([head], size=size, tasks=("t",), prompt=(100, 5000), answer=60, one_by_one=True).run(600)
    depths: dict[bool, list[int]] = {True: [], False: []}
    for _ in range(400):
        running = list(world.running)
        world.step()
        for request, choice in zip(running, world.choices, strict=True):
            depths[request.length > 5000].append(choice.depth)
    assert min(map(len, depths.values())) > 50
    assert mean(depths[True]) < 1 < 1.5 < mean(depths[False]), "trials of long ones are shallow and paid for"


def test_the_same_world_makes_the_same_choices() -> None:
    def choices() -> Iterator[list[Choice]]:
        world = steady(0.7, 4)
        for _ in range(60):
            world.step()
            yield world.choices

    assert list(choices()) == list(choices())


@pytest.mark.parametrize("size", [4, 32])
def test_where_nothing_pays_it_rests(size: int) -> None:
    """Most steps are as without speculation, trials and searches included."""
    world = steady(0.05, size, clock=FakeClock(2e-3)).run(150)
    world.restart()
    num_drafted = 0
    for _ in range(300):
        world.step()
        num_drafted += any(choice.drafts for choice in world.choices)
    assert world.rate > 0.98 * world.off_rate()
    assert num_drafted < 45
    assert not world.report().speculating


def test_it_wakes_when_the_load_changes() -> None:
    world = steady(0.85, 64, clock=FakeClock(4e-3)).run(150)
    assert world.choices == [NOTHING] * 64
    world.running = world.running[:1]
    world.run(30)
    world.restart()
    world.run(100)
    assert world.rate > 1.5 * world.off_rate()


@pytest.mark.parametrize(("size", "row_s"), [(1, 0.002), (4, 0.002), (16, 0.0005)])
def test_a_shift_of_the_traffic_is_followed_and_back(size: int, row_s: float) -> None:
    """Clients that name no task: within 200 tokens a request the setting is right again."""
    drafter = chain("a", dict(alpha := {"": 0.85}))
    machine = Machine(row_s=row_s)
    world = World([drafter], size=size, tasks=("",), prompt=8, answer=60, one_by_one=True, machine=machine)
    world.run(200)
    assert isinstance(drafter.alpha, dict)
    for alpha[""] in (0.05, 0.85, 0.05, 0.85):
        drafter.alpha.update(alpha)
        world.restart()
        while world.tokens < 200 * size:
            world.step()
        world.restart()
        while world.tokens < 200 * size:
            world.step()
        assert world.rate > (0.95 if size < 16 else 0.93) * world.batch_best_rate(size), alpha


def test_a_dear_drafter_is_left_for_a_cheap_one() -> None:
    drafters = [chain("dear", {"t": 0.9}, level_s=0.05), chain("cheap", {"t": 0.6}, level_s=0.0005)]
    world = World(drafters, size=2, tasks=("t",), prompt=0, answer=FOREVER).run(100)
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


def test_lookups_are_asked_first_and_short_proposals_are_not_used() -> None:
    """Long ones are accepted, and what they yield is more than what drafts would."""
    lookup = Simulated(
        PolicyDrafter("suffix", 8, False, True),
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
    lookup = Simulated(PolicyDrafter("suffix", 8, False, True), {"t": 0.0}, found={"t": [(1.0, 4)]})
    world = World([lookup], size=4, tasks=("t",), prompt=0, answer=FOREVER).run(150)
    assert world.choices == [NOTHING] * 4


# --- what is spent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.85])
@pytest.mark.parametrize("share", [0.005, 0.03])
def test_trials_and_probes_cost_no_more_than_their_share(alpha: float, share: float) -> None:
    world = steady(alpha, 4, probe_share=share).run(1200)
    policy = world.policy
    owed_s = MAX_TRIAL_STEPS * world.machine.step_s(4, 8)  # a trial that goes on is paid off afterwards
    assert policy.budget.spent_s <= share * policy.budget.total_s * 1.01 + owed_s
    assert policy.budget.spent_s <= 1.1 * share * policy.budget.total_s
    world.restart()
    world.run(200)
    assert world.rate > (0.98 - share) * max(world.best_rate(), world.off_rate())


def test_nothing_is_tried_or_probed_without_a_share_but_choices_adapt() -> None:
    world = steady(0.85, 1, probe_share=0.0).run(150)
    policy = world.policy
    assert policy.budget.spent_s == 0
    assert control_report(policy).realised is None
    assert not policy.may_score(0)
    world.restart()
    world.run(60)
    assert world.rate > 0.95 * world.best_rate()
    for drafter in world.drafters:
        assert isinstance(drafter.alpha, dict)
        drafter.alpha["t"] = 0.02
    world.run(150)
    assert world.chosen() == [(NO_DRAFTER, 0)]
    assert world.policy.budget.spent_s == 0


def test_an_unknown_drafter_is_given_to_one_request() -> None:
    """Nobody knows what it costs, and all of them would have their text computed."""
    world = World([chain("a", {"t": 0.9}, missed_s=0.001)], size=16, tasks=("t",), prompt=500, answer=FOREVER)
    world.step()
    assert sum(member == 0 for member, _ in world.chosen()) == 1


def test_probes_measure_the_gain() -> None:
    world = steady(0.8, 4, probe_share=0.03, noise=0.02).run(1000)
    speedup = world.report().realised
    assert speedup is not None
    assert speedup.low < world.best_rate() / world.off_rate() * 1.02
    assert speedup.high > world.rate / world.off_rate()
    assert 0 < world.probing_s < 0.2 * world.seconds


def test_probes_report_nothing_where_prompts_always_arrive() -> None:
    """No step without prompts, no fair comparison; and none is paid for."""
    world = World([chain("a", {"t": 0.8})], size=8, tasks=("t",), prompt=32, answer=4, one_by_one=True)
    policy = world.policy
    for _ in range(300):
        if not world.waiting:
            world.waiting = [world._begin()]
        world.step()
        world.running = world.running[-8:]
        assert not policy.in_probe
    assert control_report(policy).realised is None
    assert control_report(policy).realised is None


def test_a_probe_that_prompts_interrupt_is_given_up() -> None:
    world = steady(0.85, 4, probe_share=0.05).run(60)
    while not world.policy.in_probe:
        world.step()
    before = world.report().realised
    choices = world.policy.choose([world.asked(request) for request in world.running], 100)
    assert not world.policy.in_probe
    assert any(choice != NOTHING for choice in choices)
    for _ in range(NUM_OFF_STEPS):
        world.step()
    assert world.report().realised == before, "no pair came of it"


@pytest.mark.parametrize("alpha", [0.05, 0.85])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_searches_are_as_seldom_as_their_price_demands(alpha: float, share: float) -> None:
    """Where steps are short, a search may take a tenth of one and more."""
    world = steady(alpha, 4, clock=FakeClock(share * Machine().step_s(4, 8))).run(300)
    world.restart()
    searching_s = 0.0
    for _ in range(800):
        world.step()
        searching_s += world.policy.planning_s
    assert searching_s < 1.2 * SEARCH_SHARE * world.seconds
    assert searching_s > 0.25 * SEARCH_SHARE * world.seconds, "or nothing new would be learned"
    assert world.rate > 0.96 * max(world.best_rate(), world.off_rate())


def test_with_searches_that_cost_much_a_shift_is_followed() -> None:
    """The usual one of several random worlds: when a shift is noticed there is a matter of a few looks."""
    shares: dict[float, list[float]] = {0.05: [], 0.85: []}
    for seed in range(5):
        world = steady(0.85, 4, clock=FakeClock(0.1 * Machine().step_s(4, 8)))
        world.random.seed(seed)
        world.run(300)
        for alpha in shares:
            for drafter in world.drafters:
                assert isinstance(drafter.alpha, dict)
                drafter.alpha["t"] = alpha
            world.run(400)
            world.restart()
            world.run(200)
            shares[alpha].append(world.rate / max(world.best_rate(), world.off_rate()))
    assert min(shares[0.05]) > 0.92
    assert median(shares[0.85]) > 0.92


def test_a_load_that_was_there_before_needs_no_new_search() -> None:
    world = steady(0.85, 4).run(300)
    requests = [world.asked(request) for request in world.running]
    policy = world.policy
    while policy.planning_s == 0:  # the plan is new then
        world.step()
    policy.choose(requests[:1], 0)
    assert policy.planning_s > 0, "another load"
    policy.choose(requests, 0)
    assert policy.planning_s == 0
    policy.choose(requests[:1], 0)
    assert policy.planning_s == 0


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
    world = steady(0.9, 4, allowed=members)
    for _ in range(80):
        world.step()
        assert {member for member, _ in world.chosen()} <= members | {NO_DRAFTER}
    assert world.num_asked[0] == 0
    assert (world.num_asked[1] > 0) == (1 in members)


def test_a_drafter_that_fails_everyone_is_left_at_once() -> None:
    world = steady(0.9, 4).run(60)
    assert {member for member, _ in world.chosen()} == {0}
    for request in world.running:
        request.allowed = frozenset({1})
    world.restart()
    for _ in range(60):
        world.step()
        assert 0 not in {member for member, _ in world.chosen()}
    assert {member for member, _ in world.chosen()} == {1}


@pytest.mark.parametrize(("answer", "pays"), [(8, False), (1000, True)])
def test_short_answers_start_no_draft_model_on_long_prompts(answer: int, pays: bool) -> None:
    drafter = chain("model", {"t": 0.8}, missed_s=0.0005)
    world = World([drafter], size=4, tasks=("t",), prompt=400, answer=answer, one_by_one=True)
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
    policy = world.policy
    assert policy.announce(StepRequest(77, "t", 0, 50), 50, 50, 500) == 0
    assert policy.announce(StepRequest(78, "never seen", 0, 50), 50, 50, 500) == 0  # as most are
    resting = steady(0.05, 4).run(100).policy
    assert resting.announce(StepRequest(77, "t", 0, 50), 50, 50, 500) == NO_DRAFTER


# --- without adapting ------------------------------------------------------------------------------------------


def test_fixed_everyone_is_drafted_for_as_deep_as_allowed() -> None:
    world = steady(0.05, 4, adaptive=False, probe_share=0.02, limit=5)
    probes = 0
    for _ in range(600):
        world.step()
        expected = [(NO_DRAFTER, 0)] * 4 if world.policy.in_probe else [(0, 5)] * 4
        assert world.chosen() == expected
        probes += world.policy.in_probe
    assert NUM_OFF_STEPS <= probes < 60
    assert probes % NUM_OFF_STEPS == 0 or world.policy.in_probe
    assert not world.report().adaptive
    speedup = world.report().realised
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
    policy = world.policy
    assert policy.num_held <= 16
    for request in [*world.running, *world.waiting]:
        policy.release(request.sequence_id, request.task, request.output)
    assert policy.num_held == 0


def test_memory_is_bounded_by_what_runs() -> None:
    """Requests that are aborted before they have run, tasks by the thousand, long rests."""
    world = steady(0.05, 4).run(60)
    policy = world.policy
    policy.release(9999, "task 0", 1000)
    for number in range(1, 3000):
        policy.announce(StepRequest(10_000 + number, f"task {number}", 0, 5), 5, 5, 5)
        policy.release(10_000 + number, f"task {number}", 3)
    assert policy.num_held < 10
    assert policy.traffic.usual_length("task 0") < 4, "dropped"
    assert policy.traffic.usual_length("task 2999") == 3
    tasks = tuple(f"task {number}" for number in range(1000))
    alpha = dict.fromkeys(tasks, 0.5)
    world = World([chain("a", alpha)], size=4, tasks=tasks, prompt=4, answer=3).run(500)
    assert len(world.report().tasks) <= MAX_TASKS
    assert world.policy.num_held <= 8


def test_how_long_answers_are_is_learned_by_task() -> None:
    policy = Policy([PolicyDrafter("a", 4, True)], adaptive=True, probe_share=0.0, pass_s=lambda rows: 0.02)
    for _ in range(50):
        policy.release(0, "long", 400)
        policy.release(0, "short", 5)
        policy.release(0, "short", None)
    assert policy.traffic.usual_length("long") == pytest.approx(400)
    assert policy.traffic.usual_length("short") == pytest.approx(5)
    assert 5 < policy.traffic.usual_length("unknown") < 400


# --- corner cases ----------------------------------------------------------------------------------------------


def observe(
    policy: Policy, seen: Seq[StepRequest], calls: Seq[DraftCall], num_rows: int, seconds: float
) -> None:
    checked = sum(request.num_checked for request in seen)
    policy.observe(
        seen, calls, num_rows=num_rows, num_prompt_rows=0, num_checked=checked, undrafted_s=seconds
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.filterwarnings("error")
def test_times_that_cannot_be_teach_nothing(seconds: float) -> None:
    world = steady(0.85, 4).run(100)
    policy = world.policy
    before = policy.step_cost.step_s(4, 8, 4, 4), policy.budget.total_s
    for _ in range(10):
        observe(policy, [drafted(1, 2, 1)], [DraftCall(1, 2, 2, 0)], 3, seconds)
    assert (policy.step_cost.step_s(4, 8, 4, 4), policy.budget.total_s) == before
    world.restart()
    world.run(60)
    assert world.rate > 0.95 * world.best_rate()


@pytest.mark.parametrize("jump_s", [-1e4, 1e4])
def test_a_clock_that_jumps_fixes_no_plan_for_ever(jump_s: float) -> None:
    looks = 0
    now_s = 0.0

    def clock() -> float:
        """Each search seems to take `jump_s`, after the first hundred."""
        nonlocal looks, now_s
        looks += 1
        now_s += jump_s if looks > 20 and looks % 2 == 0 else PLAN_S
        return now_s

    world = steady(0.85, 4, clock=clock)
    while looks < 20:
        world.step()
    world.run(4 * MAX_AGE)
    assert looks >= 20 + 2 * 3


def test_empty_batches_and_strange_names_do_not_raise() -> None:
    policy = Policy([PolicyDrafter("a", 4, True)], adaptive=True, probe_share=0.01, pass_s=lambda rows: 0.02)
    assert policy.choose([], 0) == []
    observe(policy, [], [], 64, 0.02)
    assert policy.choose([], 64) == []
    assert control_report(policy).tasks == ()
    assert control_report(policy).estimated_speedup is None
    assert len(policy.choose([StepRequest(1, "\u2603" * 1000, 3)], 0)) == 1
    policy.release(999, "unheard of", None)
    policy.release(999, "unheard of", 0)
    assert policy.choose([StepRequest(2, "", 0, allowed=frozenset())], 0) == [NOTHING]


def test_a_report_says_what_is_going_on() -> None:
    world = steady(0.85, 4, probe_share=0.02).run(600)
    report = control_report(world.policy, [3, 0], [False, True])
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
    assert dict(report.depth_by_batch)[4] == pytest.approx(
        median(depth for _, depth in world.chosen()), abs=1.5
    )


def test_each_task_has_an_estimate_of_its_own() -> None:
    drafter = chain("a", {"sql": 0.9, "creative": 0.05})
    world = World([drafter], size=4, tasks=("sql", "creative"), prompt=0, answer=FOREVER).run(200)
    estimates = {task.task: task.estimated_speedup for task in world.report().tasks}
    assert estimates["sql"] is not None
    assert estimates["creative"] is not None
    assert estimates["sql"] > 1.5
    assert estimates["creative"] < 1.0, "it waits for the drafts of the others"


def test_break_even_is_where_one_token_pays() -> None:
    machine = Machine(read_s=0.02, row_s=0.0)
    world = steady(0.85, 1, machine=machine).run(200)
    [task] = world.report().tasks
    assert task.break_even == pytest.approx(0.0016 / 0.0211, abs=0.03)


def test_break_even_is_of_drafts_as_deep_as_they_are() -> None:
    """One draft token does not pay where a call is dear; eight do, and the report must not say otherwise."""
    dear = Simulated(PolicyDrafter("dear", 8, True), {"t": 0.9}, call_s=0.02)
    world = World([dear], size=1, tasks=("t",), prompt=0, answer=FOREVER).run(200)
    [task] = world.report().tasks
    assert task.depth > 3
    assert task.estimated_speedup is not None
    assert task.estimated_speedup > 1.3
    assert task.acceptance_rate is not None
    assert task.break_even is not None
    assert task.break_even < task.acceptance_rate < 0.9


def test_requests_that_have_ended_are_counted_by_task() -> None:
    world = World([chain("a", {"sql": 0.9, "chat": 0.5})], size=1, tasks=("sql", "chat"), prompt=0, answer=20)
    world.run(200)
    numbers = {task.task: task.num_requests for task in world.report().tasks}
    assert min(numbers.values()) > 2
    assert abs(numbers["sql"] - numbers["chat"]) <= 1


def test_it_is_told_when_the_first_probe_comes() -> None:
    world = World(
        [chain("a", {"t": 0.8})], size=1, tasks=("t",), prompt=0, answer=FOREVER, adaptive=False, noise=0
    ).run(12)
    report = world.report()
    wait_s = report.next_probe_s
    assert wait_s is not None
    assert wait_s > 0
    assert report.num_pairs == 0
    begin_s = world.seconds
    while not world.policy.in_probe:
        last_s = world.seconds
        world.step()
    assert last_s - begin_s == pytest.approx(wait_s, abs=0.2 * wait_s)
    world.run(10)
    [task] = world.report().tasks
    assert task.num_pairs == world.report().num_pairs == 1


@pytest.mark.parametrize(("alpha", "probe_share"), [(0.02, 0.005), (0.8, 0.0)])
def test_where_nothing_is_drafted_or_probed_no_probe_comes(alpha: float, probe_share: float) -> None:
    world = World(
        [chain("a", {"t": alpha})], size=1, tasks=("t",), prompt=0, answer=FOREVER, probe_share=probe_share
    ).run(150)
    assert world.report().next_probe_s is None


@pytest.mark.parametrize("limit", [4, 0])
def test_a_step_in_which_no_drafter_had_a_proposal_is_speculations_too(limit: int) -> None:
    """The realised speedup is that of all steps in which drafts were allowed, not of the lucky ones: probes compare
    with them."""
    policy = Policy(
        [PolicyDrafter("a", 4, True)], adaptive=False, probe_share=0.5, pass_s=lambda rows: 0.01 * rows
    )
    probes = 0
    for _ in range(100):
        [choice] = policy.choose([StepRequest(0, "t", limit, length=10)], 0)
        probes += policy.in_probe
        observe(policy, [StepRequest(0, "t", limit, choice=choice, num_tokens=1)], [], 1, 0.01)
    assert (probes > 0) == (limit > 0)
