"""Chooses, step by step, which drafter guesses for whom and how deep: never slower for having speculated.

The choice is `plan.Market`'s, from the costs of this engine's own steps and the acceptance of its own traffic, both
learned as they come, so that a wrong choice corrects itself. What is not chosen is not forgotten: now and then a
request tries it for a few steps, and now and then all go without drafts for a few steps, which tells what speculation
really gains. What either costs is estimated beforehand and paid out of a fixed share of the time (`probe_share`), so
what finding out costs is bounded, whatever the traffic.

Everything that is decided rests on steps that are over: the tokens of a draft at hand have no say in whether it is
checked (non-anticipation), so the classical verifiers stay exact too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from slipstream.control.budget import Budget
from slipstream.control.choice import Asked, Member
from slipstream.control.facts import StepFacts
from slipstream.control.knowledge import Knowledge, Use
from slipstream.control.offers import guesses, offer
from slipstream.control.plan import Guesses, Market, Plan
from slipstream.control.probes import Probes
from slipstream.control.realised import Pair
from slipstream.control.realised import Step as ComparedStep
from slipstream.control.report import ControlReport, MethodReport, TaskReport
from slipstream.control.stand_back import StandBack
from slipstream.control.standing import Standing, load_level
from slipstream.control.step_cost import Drafted, Mean
from slipstream.control.tries import Tries
from slipstream.draft.choice import NOBODY, NOTHING, Choice

PLAN_SHARE = 0.005
"""Of the time, for making plans: one holds until it has paid for itself, and for the books of its step."""
MAX_HELD_STEPS = 192
"""A plan holds no longer than so many steps take, however long the clock says that making it took."""
RECALLED = 2
"""Times as long as a plan holds, it may be recalled when the load comes back that it was made for."""
BOOKS_SHARE = 0.005
"""Of the time, for the books: deciding anew and learning. Where steps are so short that this takes more, what was
decided is done again for some steps of which nothing is told but the time."""
MAX_REPEATS = 16
"""Such steps between two that are told of."""
KEPT_GAIN = 1.01
"""A plan must be better than the one that holds by so much: changing costs something too."""
DRAFTS_GAIN = 1.05
"""Where lookups are asked first, a step must be better with drafts than with these alone by so much before drafts
begin: what they are worth and what they cost is known from fewer steps, and the best of many uncertain estimates is too
good to be true."""


class Controller:
    """The engine asks before each step and reports after it. Not thread-safe."""

    def __init__(
        self,
        members: Seq[Member],
        *,
        adaptive: bool,
        probe_share: float,
        pass_s: Callable[[float], float] = float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pass_s` is what a target pass should take by rows. Without `adaptive`, the first member drafts for
        everyone as deep as it may, and probes are all that is done."""
        self.members = tuple(members)
        self.adaptive = adaptive
        self.known = Knowledge(members, pass_s)
        self.budget = Budget(probe_share, pass_s(1.0), self.known.step_s)
        self.tries = Tries(self.known, self.budget)
        self.probes = Probes(self.budget, self.known.step_s)
        self.realised = self.probes.realised
        self._clock = clock
        self._plan = (
            Standing(NOTHING, held_s=0.0, until_s=0.0)
            if adaptive
            else Standing(Choice(0, self.members[0].max_depth), math.inf)
        )
        self._alone = self._beside = self._plan
        """The last ones for steps without prompts, which are most, and for steps with some."""
        self._by_load: dict[tuple[int, bool], Standing] = {}
        """Plans for other loads, which hold again when these come back: making one at every change would cost more
        than it gains."""
        self._back = StandBack()
        self._others = Mean()
        """Rows of prompts, in steps that have some."""
        self._speculates = False
        self._is_steady = False
        """Nothing is tried or probed."""
        self._repeats = 0
        """Steps to come that may repeat what was decided."""
        self._passed_s: list[float] = []
        """What those took that did, since the last one that was told of."""
        self._books_s = Mean()
        self.planning_s = 0.0
        """What making a plan took in this step."""

    @property
    def in_probe(self) -> bool:
        """True for a step that shows what is gained: nobody is drafted for in it."""
        return self.probes.rests

    @property
    def tried(self) -> int | None:
        """The request that tries something in this step, if one does; its outcome is always to be told."""
        return self.tries.in_this_step

    # --- before a step ----------------------------------------------------------------------------------------

    def choose(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        """Member and levels for each request of a step whose pass has `num_other_rows` rows beside one a request."""
        self.known.begin_step()
        if not asked and self.probes.in_this_step:
            self.probes.give_up()  # nothing to compare with
        choices = self._chosen_now(asked, num_other_rows) if asked else []
        self._speculates = any(choice is not NOTHING and choice != NOTHING for choice in choices)
        return choices

    def repeats(self, num_requests: int, beside_prompts: bool = False) -> bool:
        """Instead of `choose`: True where each request gets its `standing` choice.

        It does as long as the plan holds, between two steps that are told of; and where nothing is drafted for anybody.
        With prompts in the step it does only then, since somebody may have to begin with them.
        """
        plan = self._beside if beside_prompts else self._alone
        nobody = self._alone.is_nothing and self._beside.is_nothing
        if (beside_prompts or plan is not self._plan) and not nobody:
            return False
        if not self._is_steady or plan.held_s <= 0 or (self._repeats <= 0 and not plan.is_nothing):
            return False
        if self.adaptive and not plan.is_for(num_requests, beside_prompts):
            return False
        with_drafts = plan.withheld is not None
        if (
            with_drafts
            and not beside_prompts
            and self.probes.can_begin(num_requests, True, self._probe_price_s())
        ):
            return False
        self._plan = plan
        self._speculates = self._speculates and not plan.is_nothing
        self.known.turn += 1
        return True

    @property
    def wants_books(self) -> bool:
        """False where the step that was begun last is one of which only `pass_by` is told."""
        return self._repeats <= 0

    @property
    def rests(self) -> bool:
        """True where nothing is drafted for anybody as long as the plan holds."""
        return self._plan.is_nothing

    def standing(self, sequence_id: int, task: str) -> Choice:
        """What was decided for a request, or for its task; it may have less than that, by its limit."""
        return self._plan.choice(sequence_id, task)

    def meet(self, member: int, sequence_id: int, length: int) -> None:
        """A drafter is asked for a request in this step, whose text has `length` tokens."""
        self.known.meet(member, sequence_id, length)

    def announce(self, sequence_id: int, task: str, num_rows: int, length: int, max_tokens: float) -> int:
        """Which drafter is to compute a prompt while the target computes `num_rows` of it, up to `length`; or `NOBODY`.

        The one that will probably draft, unless an answer of at most `max_tokens` cannot earn what the prompt costs.
        """
        self.known.forget_many()
        member = self._expected(task, length, max_tokens)
        if member != NOBODY:
            self.known.meet_prompt(member, sequence_id, num_rows, length)
        return member

    def _chosen_now(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        withheld = self._plan.withheld
        price_s = None if self.tries.under_way else self._probe_price_s()
        if self.probes.choose(len(asked), num_other_rows, withheld is not None, price_s):
            if self.probes.rests or withheld is None:
                return [NOTHING] * len(asked)
            return [self.bounded(withheld.choice(each.sequence_id, each.task), each) for each in asked]
        if not self.adaptive:
            return [self.bounded(self._plan.usual, request) for request in asked]
        return self._adapted(asked, num_other_rows)

    def _expected(self, task: str, num_prompt_tokens: int, max_tokens: float) -> int:
        if not self.adaptive:
            return 0
        plan = self._alone if self.budget.total_s < self._alone.until_s else self._plan
        member, depth, _, _ = plan.of_task.get(task, plan.usual)
        if member == NOBODY or not depth:
            return NOBODY
        if plan.undrafted_rate > 0:
            num_tokens = min(max_tokens, self.known.usual_length(task))
            saved_s = num_tokens / plan.undrafted_rate * (1 - 1 / plan.drafts_gain)
            if saved_s < num_prompt_tokens * self.known.draft_costs[member].missed_token_s:
                return NOBODY
        return member

    def _adapted(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        beside_prompts = num_other_rows > 0
        if beside_prompts:
            self._others.learn(float(num_other_rows))
        if not self._plan.is_for(len(asked), beside_prompts):
            self._recall(asked, beside_prompts)
        if self._plan.held_s <= 0 or not self._plan.is_for(len(asked), beside_prompts):
            # Where prompts take all the room of a step, nobody may have drafts in it; that says nothing of the next.
            able = [request for request in asked if request.limit > 0]
            if len(able) == len(asked) or not num_other_rows:
                self._replan(asked, beside_prompts, len(asked))
            elif 2 * len(able) >= len(asked):
                self._replan(able, beside_prompts, len(asked))
        plan = self._plan
        choices = [
            self.bounded(
                plan.chosen.setdefault(request.sequence_id, plan.of_task.get(request.task, plan.usual)),
                request,
            )
            for request in asked
        ]
        trial = self.tries.choice(asked)
        if trial is not None:
            place, choice = trial
            choices[place] = self.bounded(choice, asked[place])
        return choices

    def _recall(self, asked: Seq[Asked], beside_prompts: bool) -> None:
        """Let the plan hold that was made for such a load, if it has not held long enough yet.

        Not where somebody would have to compute a long text first: whether that pays was not asked then.
        """
        number, now_s = len(asked), self.budget.total_s
        plans = [
            plan
            for plan in self._by_load.values()
            if plan.held_s > 0 and now_s < plan.until_s and plan.is_for(number, beside_prompts)
        ]
        if not plans:
            return
        plan = min(plans, key=lambda each: abs(each.num_requests - number))
        plan.take_over(self._plan)
        for request in asked:
            member = self.bounded(plan.choice(request.sequence_id, request.task), request).drafter
            is_new = request.num_output <= 1  # what its prompt takes was weighed when that was begun with
            if member != NOBODY and not is_new and self.known.num_unseen(member, request):
                return
        self._hold(plan)

    def _hold(self, plan: Standing) -> None:
        self._plan = plan
        if plan.beside_prompts:
            self._beside = plan
        else:
            self._alone = plan

    def bounded(self, choice: Choice, request: Asked) -> Choice:
        """What of a choice the request may have."""
        member, depth, lookup, min_tokens = choice
        limit, allowed = request.limit, request.members
        if choice == NOTHING or (allowed is None and limit >= max(depth, min_tokens, 1)):
            return choice
        if limit < 1:
            return NOTHING
        if member != NOBODY and allowed is not None and member not in allowed:
            member = NOBODY
        if lookup != NOBODY and (min_tokens > limit or (allowed is not None and lookup not in allowed)):
            lookup = NOBODY
        if member == lookup == NOBODY:
            return NOTHING
        return Choice(member, min(depth, limit) if member != NOBODY else 0, lookup, min_tokens)

    # --- plans ------------------------------------------------------------------------------------------------

    def _replan(self, asked: Seq[Asked], beside_prompts: bool, num_requests: int) -> None:
        """Plan for those of `num_requests` that may have drafts."""
        started_s = self._clock()
        self.known.work_in()
        market = Market(
            [offer(self.known, m, asked) for m in range(len(self.members))],
            self.known.cost,
            len(asked),
            self._others.value if beside_prompts else 0.0,
        )
        nothing = market.nothing()
        old = self._as_plan(asked)
        look = partial(guesses, self.known, asked, market) if self.known.lookups else None
        plan = market.best(look)
        kept = market.price(old.members, old.depths, plan.guesses)
        if kept.tokens_per_s * KEPT_GAIN >= plan.tokens_per_s:
            plan = kept
            if look:
                looked = market.price(old.members, old.depths, look(kept))
                plan = max(plan, looked, key=lambda each: each.tokens_per_s)
        if look:
            plan = self._unless_unsure(market, plan, old, look)
        choices = [
            Choice(m, self._levels_asked(m, d), *guess)
            for m, d, guess in zip(
                plan.members.tolist(), plan.depths.tolist(), plan.guesses.choices, strict=True
            )
        ]
        slower = plan.step_s / nothing.step_s if nothing.step_s > 0 else 1.0
        before = self._beside if beside_prompts else self._alone
        now = Standing(NOTHING, 0.0, math.inf, num_requests, beside_prompts)
        now.of_task, now.gains = self._plan.of_task | before.of_task, self._plan.gains | before.gains
        now.decide(asked, choices, [tokens / slower for tokens in market.tokens(plan)])
        now.undrafted_rate = market.nothing(plan.guesses).tokens_per_s
        now.drafts_gain = plan.tokens_per_s / now.undrafted_rate if now.undrafted_rate else 1.0
        now.gain = plan.tokens_per_s / nothing.tokens_per_s if nothing.tokens_per_s else None
        now = self._unless_losing(now, asked)
        self._by_load[load_level(num_requests), beside_prompts] = now
        self._hold(now)
        self.tries.consider(
            market,
            plan,
            asked,
            self._books_s.value,
            lambda number: Choice(number, self._levels_asked(number, 1)),
        )
        now.is_nothing = not self.tries.under_way and all(c == NOTHING for c in now.chosen.values())
        self.planning_s = took_s = max(self._clock() - started_s, 0.0)  # clocks may jump
        price_s = took_s + self._books_s.value
        now.held_s = min(price_s / PLAN_SHARE, MAX_HELD_STEPS * self.known.step_s.value)
        now.until_s = self.budget.total_s + RECALLED * now.held_s

    def _unless_losing(self, plan: Standing, asked: Seq[Asked]) -> Standing:
        """The plan; or nothing, where paired probes say that drafts lose at this load, and the plan to be tried."""
        if plan.gain is None or all(choice == NOTHING for choice in plan.chosen.values()):
            return plan
        if not self._back.is_active(plan.num_requests) or self._back.trusts(plan.num_requests, plan.gain):
            return plan
        return plan.withhold(asked)

    def _unless_unsure(self, market: Market, plan: Plan, old: Plan, look: Callable[[Plan], Guesses]) -> Plan:
        """The plan, or what lookups do alone where drafters gain too little beside them to begin with."""
        asked = set(plan.members.tolist()) - {NOBODY}
        if not asked or (old.members != NOBODY).any():
            return plan
        if not all(self.known.draft_costs[member].is_known for member in asked):
            return plan  # one request finds out, which shows in no step of many
        nothing = market.nothing()
        alone = max(nothing, market.nothing(look(nothing)), key=lambda each: each.tokens_per_s)
        return alone if plan.tokens_per_s < DRAFTS_GAIN * alone.tokens_per_s else plan

    def _as_plan(self, asked: Seq[Asked]) -> Plan:
        """The choices that hold, for the requests at hand."""
        choices = [
            self.bounded(self._plan.choice(request.sequence_id, request.task), request) for request in asked
        ]
        members = np.array([choice.drafter for choice in choices])
        depths = np.array([min(choice.depth, self._levels(choice.drafter)) for choice in choices])
        return Plan(members, depths, Guesses.none(len(asked)), 0.0, 0.0)

    def _levels(self, member: int) -> int:
        """How many depths there are to choose from."""
        return (
            0 if member == NOBODY else self.members[member].max_depth if self.members[member].is_chain else 1
        )

    def _levels_asked(self, member: int, depth: int) -> int:
        """Trees are not chosen in depth: they are asked for all that they can be."""
        if member == NOBODY or self.members[member].is_chain:
            return depth
        return self.members[member].max_depth

    # --- probes -----------------------------------------------------------------------------------------------

    def _probe_price_s(self) -> float:
        withheld = self._plan.withheld
        lost = None if withheld is None else self._back.lost(withheld.num_requests)
        estimated, found = self._alone.gain, self._back.gain(self._alone.num_requests)
        if estimated is not None and found is not None:
            estimated = min(estimated, found)  # where drafts may be losing, looking again is cheap
        return self.probes.price_s(estimated, lost, self._books_s.value)

    def _weigh(self, pair: Pair, num_requests: int) -> None:
        """Stand back, or come back, where what drafts really gain at this load says so."""
        estimated = (self._plan.withheld or self._alone).gain or 1.0
        if not self._back.learn(num_requests, pair, estimated):
            return
        self._by_load.clear()
        for plan in (self._plan, self._alone, self._beside):
            plan.held_s = 0.0

    # --- after a step -----------------------------------------------------------------------------------------

    def learn(self, facts: StepFacts) -> None:
        """What the step did and took."""
        self.tries.in_this_step, self.planning_s = None, 0.0
        if not 0 < facts.seconds < math.inf:
            self._is_steady = False
            return  # no step takes no time: a clock jumped
        self.known.learn(facts, with_outcomes=not self.probes.rests)
        passed, self._passed_s = self._passed_s, []
        for seconds in (*passed, facts.seconds):
            self.known.step_s.learn(seconds)
        self.budget.earn(
            sum(passed) + facts.seconds, facts.num_drafted > 0 or self._plan.withheld is not None
        )
        if facts.gains and not facts.num_others:
            compared = ComparedStep(len(facts.gains), facts.seconds, facts.gains, self._speculates)
            pair = self.probes.learn(compared)
            if pair is not None and self.adaptive:
                self._weigh(pair, self.probes.num_requests)
        self._plan.held_s -= facts.seconds
        self._books_s.learn(facts.books_s)
        self._repeats = min(int(self._books_s.value / (BOOKS_SHARE * self.known.step_s.value)), MAX_REPEATS)
        if self.probes.watches(self._probe_price_s()):
            self._repeats = 0
        self._is_steady = not self.tries.under_way and not self.probes.in_this_step

    def pass_by(self, seconds: float) -> None:
        """A step that repeated what was decided, and what it took."""
        self._repeats -= 1
        if 0 < seconds < math.inf:
            self._passed_s.append(seconds)
            self._plan.held_s -= seconds

    def score(self, lookup: int, task: str, num_found: int, num_stood: int) -> None:
        """What a draft that was never checked would have come to, seen from the text that came instead."""
        self.known.score(lookup, task, num_found, num_stood)

    def may_score(self, member: int) -> bool:
        """Whether there is credit for asking a lookup what it would have guessed; pays for it."""
        price_s = self.known.draft_costs[member](Drafted(1, 1, 1))
        if not self.budget.share or not self.budget.can_pay("try", price_s):
            return False
        self.budget.pay("try", price_s)
        return True

    def release(self, sequence_id: int, task: str, num_tokens: int | None) -> None:
        """The request is over, after `num_tokens` of answer; None where it will come back."""
        for plan in (self._plan, *self._by_load.values()):
            plan.chosen.pop(sequence_id, None)
            if plan.withheld is not None:
                plan.withheld.chosen.pop(sequence_id, None)
        self.tries.release(sequence_id)
        self.known.release(sequence_id, task, num_tokens)

    # --- what is told -----------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        chosen = [len(plan.chosen) for plan in (self._plan, *self._by_load.values())]
        return max(*chosen, self.known.num_held)

    def report(self, num_failures: Seq[int] = (), retired: Seq[bool] = ()) -> ControlReport:
        """What is known now; the arguments are by member."""
        self.known.work_in()
        methods = tuple(
            MethodReport(
                name=member.name,
                acceptance_rate=self.known.acceptance[i].rate(),
                survival=tuple(self.known.acceptance[i].survival(-1, "")) if member.is_chain else (),
                num_steps=self.known.num_steps[i],
                num_failures=num_failures[i] if num_failures else 0,
                retired=retired[i] if retired else False,
            )
            for i, member in enumerate(self.members)
        )
        return ControlReport(
            adaptive=self.adaptive,
            speculating=any(use.depth.value > 0.05 for use in self.known.tasks.values()),
            stands_back=self._plan.withheld is not None,
            estimated_speedup=self._alone.gain,
            realised=self.realised.speedup(),
            probe_share=self.budget.spent_s / self.budget.total_s if self.budget.total_s else 0.0,
            methods=methods,
            tasks=tuple(self._task_report(task, use) for task, use in self.known.tasks.items()),
            depth_by_batch=tuple((n, mean.value) for n, mean in sorted(self.known.by_batch.items())),
        )

    def _task_report(self, task: str, use: Use) -> TaskReport:
        choice = self._alone.of_task.get(task, NOTHING) if self.adaptive else Choice(0, 1)
        member = choice.lookup if choice.drafter == NOBODY else choice.drafter
        rates = [self.known.acceptance[m].rate(task) for m in range(len(self.members))]
        known = [rate for rate in rates if rate is not None]
        rate = rates[member] if member != NOBODY else max(known, default=None)
        return TaskReport(
            task=task,
            method=None if member == NOBODY else self.members[member].name,
            depth=use.depth.value,
            acceptance_rate=rate,
            acceptance_length=use.tokens.value or None,
            break_even=self.known.break_even(max(member, 0), max(self._alone.num_requests, 1)),
            estimated_speedup=self._alone.gains.get(task),
            realised=self.realised.speedup(task),
        )
