"""Chooses, step by step, which drafter drafts for each request, and how deep.

Plans come from `optimise`, by the costs of this engine's own steps and the acceptance of its own traffic, both learned
as they come. A plan is kept for the load that it was made for, and searched anew when it is missing, when acceptance
has changed, and otherwise as often as a fixed share of the time allows. What is not chosen is explored, out of another
fixed share of the time (`probe_share`), so that what it costs is bounded whatever the traffic.

Everything that is decided rests on steps that are over: the tokens of a draft at hand have no say in whether it is
checked (non-anticipation), so the classical verifiers stay exact too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from slipstream.control.acceptance import length_class
from slipstream.control.budget import Budget
from slipstream.control.cost import DraftCost, Mean, StepCost
from slipstream.control.fixed import FixedPlan
from slipstream.control.optimise import Priced, Problem
from slipstream.control.plans import MAX_AGE, Plan, PlanByRules, bounded, most_common, plan_key
from slipstream.control.probes import Probes
from slipstream.control.realised import Step
from slipstream.control.stand_back import StandBack
from slipstream.control.traffic import Traffic
from slipstream.control.trials import NUM_TRIAL_STEPS, Trials
from slipstream.control.types import NO_DRAFTER, NOTHING, Choice, DraftCall, PolicyDrafter, StepRequest

SEARCH_SHARE = 0.005
"""Share of the time for searching plans."""
MIN_AGE = 8
"""Steps for which a plan is kept, unless acceptance has changed."""
KEPT_GAIN = 1.01
"""A plan must be better than the one before by so much: changing costs something too."""
DRAFTS_GAIN = 1.05
"""Where there are lookups, a step must be better with drafters than with these alone by so much before drafters begin:
what they are worth is known from fewer steps, and the best of many uncertain estimates is too good to be true."""
FIRST_DEPTHS = 1, 4, 2
"""Depths in the first trial of a drafter, which shows what its levels cost."""


class Policy:
    """`choose` comes before each step, `observe` after it. Not thread-safe."""

    def __init__(
        self,
        drafters: Seq[PolicyDrafter],
        *,
        adaptive: bool,
        probe_share: float,
        pass_s: Callable[[float], float],
        clock: Callable[[], float] = time.perf_counter,
        fixed: FixedPlan | None = None,
    ) -> None:
        """`pass_s` is what a target pass should take by rows. Without `adaptive` nothing is chosen by what is learned:
        by the `fixed` plan, or the first drafter drafts for everyone as deep as it may. Probes are made as well."""
        self.drafters = tuple(drafters)
        self.adaptive = adaptive
        self.traffic = Traffic(drafters)
        self.step_cost = StepCost(pass_s)
        self.draft_costs = [DraftCost(pass_s(1.0)) for _ in drafters]
        self.planning_s = 0.0
        """What searching a plan took in this step."""
        self._step_s = Mean()
        self.budget = Budget(probe_share, self._step_s)
        self.probes = Probes(self.budget, self._step_s)
        self._trials = Trials()
        self._trial_price_s = 0.0
        self._stand_back = StandBack()
        self._plans: dict[tuple[int, bool], Plan] = {}
        """By load bucket, and whether the step computes prompts too: then each draft token costs more."""
        self._fixed = fixed
        if adaptive:
            self.plan = Plan()
        elif fixed is not None:
            self.plan = PlanByRules(fixed)
        else:
            self.plan = Plan(usual=Choice(0, self.drafters[0].max_depth), drafts=True)
        self.alone = self.plan
        """The last one for steps without prompts."""
        self._prompt_rows = Mean()
        """In steps that have some."""
        self._clock = clock
        self._credit_s = 0.0
        """For searching; below 0 it is owed."""
        self._has_changed = False
        """Something has been learned since the last search that makes cached plans doubtful."""
        self._step = 0
        self._speculates = False
        self._num_missed = [0] * len(self.drafters)
        """Tokens of text that each drafter has to compute in this step before it can draft."""
        self.depth_by_batch: dict[int, Mean] = {}

    def read_tasks_by(self, client_task: Callable[[str], str]) -> None:
        """Tasks go by names for statistics, from which this tells what the client called them."""
        if self._fixed is not None:
            self._fixed.client_task = client_task

    # --- before a step ----------------------------------------------------------------------------------------

    @property
    def in_probe(self) -> bool:
        """True for a step without drafts, to measure what they gain."""
        return self.probes.rests

    def choose(self, requests: Seq[StepRequest], num_prompt_rows: int) -> list[Choice]:
        """The choice for each request of a step whose pass has `num_prompt_rows` rows in addition to one a request."""
        self._step += 1
        self._speculates, self.planning_s, self._num_missed = False, 0.0, [0] * len(self.drafters)
        if not requests:
            self.probes.give_up()  # nothing to compare with
            return []
        plan = self._plan_for(requests, num_prompt_rows) if self.adaptive else self.plan
        self.plan = plan = plan.at(len(requests))
        if not num_prompt_rows:
            self.alone = plan
        choices = plan.choices(requests)
        plan.drafts = any(choice.drafts for choice in choices)
        if not plan.drafts:
            self.budget.withdraw("probe")  # there is nothing to compare
        probes = self._probes_now(plan, len(requests), num_prompt_rows)
        if probes != plan.withheld:  # what is withheld is drafted in probes, all else outside them
            choices = [NOTHING] * len(requests)
        if self.adaptive and not probes:
            self._try(requests, choices)
        self._speculates = any(choice.drafts for choice in choices)
        return choices

    @property
    def may_repeat(self) -> bool:
        """Whether the step behind this one may do as it chose, without being chosen for."""
        return self.probes.goes_on and not self._trials.under_way

    def repeat(self, speculates: bool) -> None:
        """In the place of `choose`, for a step that did as the one before it; `speculates`: with drafts."""
        self._step += 1
        self._speculates, self.planning_s, self._num_missed = speculates, 0.0, [0] * len(self.drafters)

    def note_called(self, drafter: int, sequence_id: int, length: int) -> None:
        """A drafter is called for a sequence in this step, whose text has `length` tokens."""
        self._num_missed[drafter] += self.traffic.seen[drafter].note(self._step, sequence_id, length)

    def announce(self, request: StepRequest, num_rows: int, num_computed: int, max_tokens: float) -> int:
        """Which drafter is to compute a prompt while the target computes `num_rows` of it, up to `num_computed`; or
        `NO_DRAFTER`.

        The one that will probably draft, unless it may not, or an answer of at most `max_tokens` cannot earn what the
        whole prompt costs.
        """
        drafter = self._drafter_for(request.task, request.length, max_tokens)
        if drafter == NO_DRAFTER or (request.allowed is not None and drafter not in request.allowed):
            return NO_DRAFTER
        seen = self.traffic.seen[drafter]
        self._num_missed[drafter] += seen.note_prompt(self._step, request.sequence_id, num_rows, num_computed)
        return drafter

    def _unknown(self) -> list[int]:
        """Drafters whose costs are unknown; lookups take next to no time."""
        return [
            number
            for number, cost in enumerate(self.draft_costs)
            if not cost.is_known and number not in self.traffic.lookups
        ]

    def _drafter_for(self, task: str, num_prompt_tokens: int, max_tokens: float) -> int:
        plan = self.alone
        drafter = plan.for_task(task, num_prompt_tokens).drafter
        if plan.withheld or drafter == NO_DRAFTER:
            return NO_DRAFTER
        if plan.undrafted_rate > 0:
            num_tokens = min(max_tokens, self.traffic.usual_length(task))
            saved_s = num_tokens / plan.undrafted_rate * (1 - 1 / plan.drafts_gain)
            if saved_s < num_prompt_tokens * self.draft_costs[drafter].missed_token_s:
                return NO_DRAFTER
        return drafter

    # --- plans ------------------------------------------------------------------------------------------------

    def _plan_for(self, requests: Seq[StepRequest], num_prompt_rows: int) -> Plan:
        """The cached plan, or a new one."""
        if num_prompt_rows:
            self._prompt_rows.learn(float(num_prompt_rows))
        key = plan_key(len(requests), num_prompt_rows)
        plan = self._plans.get(key)
        if plan is not None and not self._is_due(plan):
            return plan
        before = plan or self.plan
        # Where prompts take all the room of a step, none may have drafts in it; that says nothing of the next one.
        able = sum(request.limit > 0 for request in requests)
        if num_prompt_rows and 2 * able < len(requests):
            return before
        started_s = self._clock()
        plan = self._plans[key] = self._search(requests, before, num_prompt_rows > 0)
        self._has_changed = False
        self.planning_s = max(self._clock() - started_s, 0.0)  # clocks may jump
        self._credit_s = max(self._credit_s - self.planning_s, -MAX_AGE * SEARCH_SHARE * self._step_s.value)
        return plan

    def _kept_plans(self) -> tuple[Plan, ...]:
        return self.plan, self.alone, *self._plans.values()

    def _is_due(self, plan: Plan) -> bool:
        if self.probes.is_active or self._trials.under_way:
            return False
        age = self._step - plan.searched_at
        return self._has_changed or age >= MAX_AGE or (age >= MIN_AGE and self._credit_s >= 0)

    def _search(self, requests: Seq[StepRequest], before: Plan, with_prompts: bool) -> Plan:
        self.learn()
        problem = Problem(
            self.traffic.rows(requests, self._usable(with_prompts), self.draft_costs),
            self.step_cost,
            self.draft_costs,
            self._prompt_rows.value if with_prompts else 0.0,
        )
        best = self._resolve(problem, [before.choice(request) for request in requests])
        options = [problem.options[place] for place in best.places.tolist()]
        choices = [self._as_requested(option) for option in options]
        nothing = problem.nothing()
        alone = problem.price(
            np.array([problem.place_of(option._replace(drafter=NO_DRAFTER, depth=0)) for option in options])
        )
        plan = Plan(searched_at=self._step, undrafted_rate=alone.tokens_per_s)
        slower = best.step_s / nothing.step_s if nothing.step_s > 0 else 1.0
        plan.by_task.update(before.by_task)
        plan.by_length.update(before.by_length)
        plan.gains.update(before.gains)
        by_task: dict[str, list[tuple[Choice, float]]] = {}
        by_length: dict[tuple[str, int], list[Choice]] = {}
        for request, choice, tokens in zip(requests, choices, problem.tokens(best), strict=True):
            if request.limit > 0:  # what may have no drafts now says nothing of others, nor of its next steps
                plan.by_sequence[request.sequence_id] = choice
                by_task.setdefault(request.task, []).append((choice, tokens / slower))
                by_length.setdefault((request.task, length_class(request.length)), []).append(choice)
        plan.usual = most_common(list(plan.by_sequence.values()) or [before.usual])
        for task, found in by_task.items():
            plan.by_task[task] = most_common([choice for choice, _ in found])
            plan.gains[task] = sum(gain for _, gain in found) / len(found)
        plan.by_length.update({each: most_common(found) for each, found in by_length.items()})
        if nothing.tokens_per_s > 0:
            plan.gain = best.tokens_per_s / nothing.tokens_per_s
            plan.drafts_gain = best.tokens_per_s / alone.tokens_per_s
            number = len(requests)
            drafts = any(choice.drafts for choice in choices)
            plan.withheld = (
                drafts
                and self._stand_back.is_active(number)
                and not self._stand_back.trusts(number, plan.gain)
            )
        self._consider_trial(problem, best, requests)
        return plan

    def _resolve(self, problem: Problem, before: Seq[Choice]) -> Priced:
        """The best plan; or the one before, or lookups alone, where it is not clearly better than these."""
        best = problem.best()
        kept = problem.price(np.array([problem.place_of(choice) for choice in before]))
        if kept.tokens_per_s * KEPT_GAIN >= best.tokens_per_s:
            return kept
        if not self.traffic.lookups or problem.drafts(kept) or not problem.drafts(best):
            return best
        alone = problem.best(with_drafters=False)
        return alone if best.tokens_per_s < DRAFTS_GAIN * alone.tokens_per_s else best

    def _usable(self, with_prompts: bool) -> list[int]:
        """Drafters that may be chosen: their costs are known. In the few steps that compute prompts only those of the
        other steps: else they would have to compute what they missed each time."""
        usable = [
            n for n, cost in enumerate(self.draft_costs) if cost.is_known and n not in self.traffic.lookups
        ]
        if with_prompts and self._step - self.alone.searched_at < MAX_AGE:
            used = {choice.drafter for choice in (self.alone.usual, *self.alone.by_sequence.values())}
            usable = [number for number in usable if number in used]
        return usable

    def _as_requested(self, option: Choice) -> Choice:
        """Trees are not chosen in depth: they are requested as large as they can be."""
        if option.drafter == NO_DRAFTER or self.drafters[option.drafter].is_chain:
            return option
        return option._replace(depth=self.drafters[option.drafter].max_depth)

    # --- exploration ------------------------------------------------------------------------------------------

    def _probes_now(self, plan: Plan, num_requests: int, num_prompt_rows: int) -> bool:
        """Whether this step is one of a probe."""
        price_s = None
        is_fair = not num_prompt_rows and self.probes.realised.can_probe(num_requests, plan.withheld)
        if is_fair and not self._trials.under_way:
            price_s = self.probe_price_s(plan, num_requests)
            if not self.budget.can_pay("probe", price_s):
                price_s = None
        return self.probes.choose(num_requests, num_prompt_rows, price_s, with_drafts=plan.withheld)

    def probe_price_s(self, plan: Plan, num_requests: int) -> float:
        if plan.withheld:
            return self.probes.back_price_s(self._stand_back.lost(num_requests))
        estimated, found = plan.gain, self._stand_back.gain(num_requests)
        if estimated is not None and found is not None:
            estimated = min(estimated, found)  # where drafts may be losing, looking again is cheap
        return self.probes.price_s(estimated)

    def _consider_trial(self, problem: Problem, plan: Priced, requests: Seq[StepRequest]) -> None:
        """Have the drafter of which least is known tried for a task that is not given it, where that can be paid."""
        best: tuple[float, int, Choice] | None = None
        for place, request in enumerate(requests):
            given = problem.options[plan.places[place]].drafter
            for number in range(len(self.drafters)):
                option = Choice(number, 1)
                if number == given or not problem.offers(place, option):
                    continue
                mine, of_task = self.traffic.acceptance[number].num_drafts(request.sequence_id, request.task)
                age = self._trials.age(request.task, number, self._step)
                score = age / (1.0 + mine + 0.1 * of_task)
                if best is None or score > best[0]:
                    best = score, place, option
        if best is None or plan.tokens_per_s <= 0:
            self.budget.withdraw("trial")
            return
        _, place, option = best
        request = requests[place]
        missing = self.traffic.seen[option.drafter].num_missing(request.sequence_id, request.length)
        price_s = NUM_TRIAL_STEPS * problem.extra_s(plan, place, option)
        price_s += missing * self.draft_costs[option.drafter].missed_token_s
        if self.budget.can_pay("trial", price_s):
            self.budget.pay("trial", price_s)
            self._trial_price_s = price_s
            self._begin_trial(request, option.drafter, [1] * NUM_TRIAL_STEPS)

    def _begin_trial(self, request: StepRequest, drafter: int, depths: Seq[int]) -> None:
        choices = [self._as_requested(Choice(drafter, depth)) for depth in depths]
        self._trials.begin(request, choices, self._step)

    def _try(self, requests: Seq[StepRequest], choices: list[Choice]) -> None:
        """Put a trial's choice in the place of the plan's. A drafter of unknown cost is tried at once, by the request
        for which it has the least text to compute: without that it could never be chosen."""
        if not self._trials.under_way:
            for number in self._unknown():
                able = [request for request in requests if bounded(Choice(number, 1), request).drafts]
                if able:
                    seen = self.traffic.seen[number]
                    request = min(able, key=lambda each: seen.num_missing(each.sequence_id, each.length))
                    self._begin_trial(request, number, FIRST_DEPTHS)
                    self._trial_price_s = 0.0
                    break
        trial = self._trials.choice(requests)
        if trial is not None:
            place, choice = trial
            choices[place] = bounded(choice, requests[place])

    def may_score(self, lookup: int) -> bool:
        """Whether a lookup is to be called for what it would have proposed, and there is credit for it; pays for it.

        Where it costs less than a step earns it does not wait for credit: otherwise the trials that come first would
        keep it from being noticed that the text repeats.
        """
        price_s = float(self.draft_costs[lookup](DraftCall(1, 1, 1)))
        if not self.adaptive:
            return False
        if price_s < self.budget.share * self._step_s.value:
            self.budget.charge("trial", price_s)
            return True
        if not self.budget.can_pay("trial", price_s):
            return False
        self.budget.pay("trial", price_s)
        return True

    # --- after a step -----------------------------------------------------------------------------------------

    def observe(
        self,
        requests: Seq[StepRequest],
        calls: Seq[DraftCall],
        *,
        num_rows: int,
        num_prompt_rows: int,
        num_checked: int,
        undrafted_s: float,
    ) -> None:
        """What a step did and took: what became of the `requests` that decoded, and the `calls` of drafters.

        The target's pass had `num_rows` rows, of which `num_prompt_rows` were prompts' and `num_checked` draft tokens.
        `undrafted_s` is all of the step but the calls and the policy's search, in seconds.
        """
        seconds = undrafted_s + sum(call.seconds for call in calls)
        if not 0 < seconds < math.inf:
            return  # no step takes no time: a clock jumped
        for call in calls:
            self._learn_cost(call)
        number = len(requests)
        # Where no drafter was called, nothing is known of what drafts come to.
        outcomes = requests if any(request.choice.drafts for request in requests) else ()
        if number:
            self.step_cost.learn(
                num_sequences=number,
                num_rows=num_rows,
                drafted=sum(request.num_checked > 0 for request in requests),
                checked=num_checked,
                seconds=undrafted_s,
            )
            if not self.in_probe:
                self.traffic.keep(outcomes)
                self.depth_by_batch.setdefault(number, Mean()).learn(num_checked / number)
        self._step_s.learn(seconds)
        self._credit_s = min(self._credit_s + SEARCH_SHARE * seconds, 0.0)
        self.budget.earn(seconds)
        if number and not num_prompt_rows:
            pair = self.probes.learn(Step(number, seconds, outcomes, self._speculates))
            changes = pair is not None and self._stand_back.learn(number, pair, self.plan.gain or 1.0)
            if changes and self.adaptive:
                self._plans.clear()
        tried = self._trials.outcome(outcomes)
        if tried is not None:
            self.learn()
            [expected, *_] = self.traffic.acceptance[tried.drafter].survival(-1, tried.task)
            if self._trials.goes_on(tried, expected):
                self.budget.pay("trial", self._trial_price_s)  # it may be owed
        if self.traffic.has_much_to_learn:
            self.learn()

    def _learn_cost(self, call: DraftCall) -> None:
        cost = self.draft_costs[call.drafter]
        was_known = cost.is_known
        cost.learn(call, self._num_missed[call.drafter])
        self._has_changed |= cost.is_known and not was_known and call.drafter not in self.traffic.lookups

    def score(self, lookup: int, task: str, num_found: int, num_accepted: int) -> None:
        """What a draft that was never checked would have come to, seen from the text that came instead."""
        self.traffic.lookups[lookup].learn(task, num_found, num_accepted)

    def release(self, sequence_id: int, task: str, num_tokens: int | None) -> None:
        """The request is over, after `num_tokens` of answer; None where it will come back."""
        self.traffic.release(sequence_id, task, num_tokens)
        for plan in self._kept_plans():
            plan.by_sequence.pop(sequence_id, None)

    def learn(self) -> None:
        self._has_changed |= self.traffic.learn()

    # --- what is known ----------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        self.learn()
        planned = [len(plan.by_sequence) for plan in self._kept_plans()]
        return max(*planned, self.traffic.num_held)
