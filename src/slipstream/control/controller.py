"""Chooses, step by step, which drafter guesses for whom and how deep: never slower for having speculated.

The choice is `plan.Market`'s, from the costs of this engine's own steps and the acceptance of its own traffic, both
learned as they come, so that a wrong choice corrects itself. What is not chosen is not forgotten: now and then a
request tries it for a few steps, and now and then all go without drafts for a few steps, which tells what speculation
really gains. What either costs is estimated beforehand and paid out of a fixed share of the time (`probe_share`), so
regret is bounded by it, whatever the traffic.

Everything that is decided rests on steps that are over: the tokens of a draft at hand have no say in whether it is
checked (non-anticipation), so the classical verifiers stay exact too.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from slipstream.control.acceptance import BUCKETS, Acceptance, Drafts, LookupYield
from slipstream.control.choice import NOTHING, Asked, Choice, Member
from slipstream.control.facts import Outcome, StepFacts
from slipstream.control.payoff import break_even
from slipstream.control.plan import NOBODY, Guesses, Market, Offer, Plan
from slipstream.control.realised import NUM_OFF_STEPS, NUM_ON_STEPS, Realised
from slipstream.control.realised import Step as ComparedStep
from slipstream.control.report import ControlReport, MethodReport, TaskReport
from slipstream.control.step_cost import MANY_MISSED, DraftCost, Drafted, Mean, StepCost

PLAN_SHARE = 0.005
"""Of the time, for making plans: one holds until it has paid for itself, and for the books of its step."""
MAX_HELD_STEPS = 192
"""A plan holds no longer than so many steps take, however long the clock says that making it took."""
TRY_STEPS = 3
"""Steps of a try, each of one level: the first token says the most for its price."""
FIRST_TRIES = 3.0
"""Passes' worth of credit to begin with, since nothing is known."""
MAX_CREDIT_STEPS = 32
"""Steps' worth of credit that can be saved up."""
BOOKS_SHARE = 0.005
"""Of the time, for the books: deciding anew and learning. Where steps are so short that this takes more, what was
decided is done again for some steps of which nothing is told but the time."""
MAX_REPEATS = 16
"""Such steps between two that are told of."""
MAX_LEARNED = 12
"""Requests of a step that are learned from; of more, each in its turn."""
KEPT_GAIN = 1.01
"""A plan must be better than the one that holds by so much: changing costs something too."""
FIRST_LENGTH = 64.0
"""Tokens of an answer before any has ended."""
MAX_UNLEARNED = 256
MAX_TASKS = 256


@dataclass(slots=True)
class _Use:
    """What a task's requests were given lately."""

    depth: Mean = field(default_factory=Mean)
    tokens: Mean = field(default_factory=Mean)


class _BestGuess(NamedTuple):
    """What a lookup that is asked first is expected to do for a request."""

    lookup: int = NOBODY
    min_tokens: int = 0
    taken: float = 0.0
    """The chance that its guess is taken."""
    tokens: float = 0.0
    """Expected to stand."""
    rows: float = 0.0
    """Expected to be checked."""
    ask_s: float = 0.0


@dataclass(slots=True)
class _Try:
    sequence_id: int
    choice: Choice
    steps_left: int = TRY_STEPS


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
        self.probe_share = probe_share
        self.cost = StepCost(pass_s)
        self.draft_costs = [DraftCost(pass_s(1.0)) for _ in members]
        self.acceptance = [Acceptance(member.max_depth) for member in members]
        self.lookups = {number: LookupYield() for number, member in enumerate(members) if member.looks_up}
        self.realised = Realised()
        self._clock = clock
        self._chosen: dict[int, Choice] = {}
        self._of_task: dict[str, Choice] = {}
        self._usual = NOTHING if adaptive else Choice(0, self.members[0].max_depth)
        """For a request of a task that was in no plan yet: as most are drafted for."""
        self._held_s = 0.0 if adaptive else math.inf
        """How long the plan must still hold."""
        self._planned_for = 0
        self._others = Mean()
        self._gain: float | None = None
        """Estimated speedup of the plan that holds."""
        self._gains: dict[str, float] = {}
        """The same by task: of its requests, in the plan that had some of them."""
        self._undrafted_rate = 0.0
        """Tokens a second of the plan with lookups alone, by estimate."""
        self._drafts_gain = 1.0
        """The part of the estimated speedup that is not the lookups'."""
        self._length = Mean()
        self._lengths: OrderedDict[str, Mean] = OrderedDict()
        """Task to tokens of an answer."""
        self._in_probe = self._resting = self._speculates = False
        self._watches = float(NUM_ON_STEPS)
        """Steps that may be told of one after the other, because a probe can be paid for and is compared with them."""
        self._is_steady = False
        """Nothing is tried or probed."""
        self._repeats = 0
        """Steps to come that may repeat what was decided."""
        self._passed_s: list[float] = []
        """What those took that did, since the last one that was told of."""
        self._books_s = Mean()
        self.planning_s = 0.0
        """What making a plan took in this step."""
        self._probe_left = self._probed_for = 0
        self._try: _Try | None = None
        self._tried: int | None = None
        self._credit_s = {"probe": 0.0, "try": FIRST_TRIES * pass_s(1.0) if probe_share else 0.0}
        self._step_s = Mean()
        self._total_s = self._probing_s = 0.0
        self._turn = 0
        self._outcomes: list[Outcome] = []
        self._depths: list[tuple[int, int]] = []
        """Sequences of a step and their draft tokens."""
        self._gone: list[int] = []
        self._tasks: OrderedDict[str, _Use] = OrderedDict()
        self._by_batch: dict[int, Mean] = {}
        self._num_steps = [0] * len(self.members)
        self._last_try: dict[tuple[int, int], int] = {}
        self._seen: list[dict[int, tuple[int, int]]] = [{} for _ in members]
        """By member, sequence to the turn in which it was asked last, and the text's length then."""
        self._num_missed = [0] * len(self.members)

    @property
    def in_probe(self) -> bool:
        """True for a step that shows what is gained: nobody is drafted for in it."""
        return self._in_probe

    @property
    def tried(self) -> int | None:
        """The request that tries something in this step, if one does; its outcome is always to be told."""
        return self._tried

    # --- before a step ----------------------------------------------------------------------------------------

    def choose(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        """Member and levels for each request of a step whose pass has `num_other_rows` rows beside one a request."""
        self._turn += 1
        self._num_missed = [0] * len(self.members)
        self._forget_many()
        choices = self._chosen_now(asked, num_other_rows) if asked else []
        self._speculates = any(choice is not NOTHING and choice != NOTHING for choice in choices)
        return choices

    def repeats(self, num_requests: int) -> bool:
        """Instead of `choose`, for a step without prompts: True where each request gets its `standing` choice.

        It does as long as the plan holds, between two steps that are told of; and where nothing is drafted for anybody.
        """
        if not self._is_steady or self._held_s <= 0 or (self._repeats <= 0 and not self._resting):
            return False
        if num_requests != self._planned_for and self._has_changed(num_requests):
            return False
        self._turn += 1
        return True

    @property
    def wants_books(self) -> bool:
        """False where the step that was begun last is one of which only `pass_by` is told."""
        return self._repeats <= 0

    @property
    def rests(self) -> bool:
        """True where nothing is drafted for anybody as long as the plan holds."""
        return self._resting

    def standing(self, sequence_id: int, task: str) -> Choice:
        """What was decided for a request, or for its task; it may have less than that, by its limit."""
        return self._chosen.get(sequence_id) or self._of_task.get(task, self._usual)

    def meet(self, member: int, sequence_id: int, length: int) -> None:
        """A drafter is asked for a request in this step; what it has not seen of the text it must compute first."""
        turn, seen = self._seen[member].get(sequence_id, (-1, 0))
        if turn != self._turn - 1:
            self._num_missed[member] += max(length - seen - 1, 0)
        self._seen[member][sequence_id] = self._turn, length

    def announce(self, sequence_id: int, task: str, num_rows: int, length: int, max_tokens: int) -> int:
        """Which drafter is to compute a prompt while the target computes `num_rows` of it, up to `length`; or `NOBODY`.

        The one that will probably draft, unless an answer of at most `max_tokens` cannot earn what the prompt costs.
        """
        self._forget_many()
        member = self._expected(task, length, max_tokens)
        if member != NOBODY:
            self._num_missed[member] += num_rows
            self._seen[member][sequence_id] = self._turn, length
        return member

    def _chosen_now(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        if self._probe_left and (num_other_rows or len(asked) != self._probed_for):
            self._probe_left = 0  # what runs now is not what it would be compared with
            self.realised.give_up()
        if not self._probe_left and self._begins_probe(asked, num_other_rows):
            self._probe_left, self._probed_for = NUM_OFF_STEPS, len(asked)
        self._in_probe = self._probe_left > 0
        if self._in_probe:
            return [NOTHING] * len(asked)
        if not self.adaptive:
            return [self.bounded(self._usual, request) for request in asked]
        return self._adapted(asked, num_other_rows)

    def _expected(self, task: str, num_prompt_tokens: int, max_tokens: int) -> int:
        if not self.adaptive:
            return 0
        member, depth, _, _ = self._of_task.get(task, self._usual)
        if member == NOBODY or not depth:
            return NOBODY
        if self._undrafted_rate > 0:
            num_tokens = min(max_tokens, self._usual_length(task))
            saved_s = num_tokens / self._undrafted_rate * (1 - 1 / self._drafts_gain)
            if saved_s < num_prompt_tokens * self.draft_costs[member].missed_token_s:
                return NOBODY
        return member

    def _usual_length(self, task: str) -> float:
        """Tokens of an answer."""
        of_task = self._lengths.get(task, self._length)
        return of_task.value if of_task.weight else FIRST_LENGTH

    def _adapted(self, asked: Seq[Asked], num_other_rows: int) -> list[Choice]:
        self._others.learn(float(num_other_rows))
        if self._held_s <= 0 or self._has_changed(len(asked)):
            # Where prompts take all the room of a step, nobody may have drafts in it; that says nothing of the next.
            able = [request for request in asked if request.limit > 0]
            if len(able) == len(asked) or not num_other_rows:
                self._replan(asked)
            elif 2 * len(able) >= len(asked):
                self._replan(able)
        choices: list[Choice] = []
        for request in asked:
            choice = self._chosen.get(request.sequence_id)
            if choice is None:
                choice = self._chosen[request.sequence_id] = self._of_task.get(request.task, self._usual)
            choices.append(self.bounded(choice, request))
        if self._try is not None:
            self._apply_try(self._try, asked, choices)
        return choices

    def _has_changed(self, num_requests: int) -> bool:
        """True when the plan was made for another load."""
        return self.adaptive and abs(num_requests - self._planned_for) > 0.2 * max(
            num_requests, self._planned_for
        )

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

    def _replan(self, asked: Seq[Asked]) -> None:
        started_s = self._clock()
        self._work_in()
        market = Market(
            [self._offer(m, asked) for m in range(len(self.members))],
            self.cost,
            len(asked),
            self._others.value,
        )
        nothing = market.nothing()
        old = self._as_plan(asked)
        look = partial(self._lookups, asked, market) if self.lookups else None
        plan = market.best(look)
        kept = market.price(old.members, old.depths, plan.guesses)
        if kept.tokens_per_s * KEPT_GAIN >= plan.tokens_per_s:
            plan = market.price(old.members, old.depths, look(kept)) if look else kept
        choices = [
            Choice(m, self._levels_asked(m, d), *guess)
            for m, d, guess in zip(
                plan.members.tolist(), plan.depths.tolist(), plan.guesses.choices, strict=True
            )
        ]
        self._chosen = {r.sequence_id: c for r, c in zip(asked, choices, strict=True)}
        self._usual = _most_common(choices)
        votes: dict[str, list[Choice]] = {}
        yields: dict[str, list[float]] = {}
        for request, choice, tokens in zip(asked, choices, market.tokens(plan), strict=True):
            votes.setdefault(request.task, []).append(choice)
            yields.setdefault(request.task, []).append(tokens)
        slower = plan.step_s / nothing.step_s if nothing.step_s > 0 else 1.0
        for task, given in votes.items():
            self._of_task.pop(task, None)
            self._of_task[task] = _most_common(given)
            self._gains[task] = sum(yields[task]) / len(yields[task]) / slower
        while len(self._of_task) > MAX_TASKS:
            oldest = next(iter(self._of_task))
            del self._of_task[oldest], self._gains[oldest]
        self._undrafted_rate = market.nothing(plan.guesses).tokens_per_s
        self._drafts_gain = plan.tokens_per_s / self._undrafted_rate if self._undrafted_rate else 1.0
        self._gain = plan.tokens_per_s / nothing.tokens_per_s if nothing.tokens_per_s else None
        self._planned_for = len(asked)
        self._consider_try(market, plan, asked)
        self._resting = self._try is None and all(choice == NOTHING for choice in choices)
        self.planning_s = took_s = max(self._clock() - started_s, 0.0)  # clocks may jump
        price_s = took_s + self._books_s.value
        self._held_s = min(price_s / PLAN_SHARE, MAX_HELD_STEPS * self._step_s.value)

    def _as_plan(self, asked: Seq[Asked]) -> Plan:
        """The choices that hold, for the requests at hand."""
        choices = [
            self.bounded(self._chosen.get(r.sequence_id, self._of_task.get(r.task, self._usual)), r)
            for r in asked
        ]
        members = np.array([choice.member for choice in choices])
        depths = np.array([min(choice.depth, self._levels(choice.member)) for choice in choices])
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

    def _lookups(self, asked: Seq[Asked], market: Market, plan: Plan) -> Guesses:
        """For each request the lookup that is to be asked first, and how long its guess must be to beat what the plan
        does otherwise, when a second is worth what the plan makes of it."""
        row_s, _ = market.marginal(plan)
        rate, price = plan.tokens_per_s, plan.tokens_per_s * row_s
        guesses = Guesses.none(len(asked))
        choices, taken, tokens, rows = list(guesses.choices), *(np.zeros(len(asked)) for _ in range(3))
        best: dict[tuple[str, float, frozenset[int] | None], _BestGuess] = {}
        ask_s = 0.0
        for i, (request, value) in enumerate(zip(asked, market.values(plan), strict=True)):
            key = request.task, value, request.members
            if key not in best:
                best[key] = self._best_guess(request, value, rate, price, len(asked))
            found = best[key]
            if found.lookup == NOBODY or request.limit < found.min_tokens:
                continue
            choices[i] = found.lookup, found.min_tokens
            taken[i], tokens[i], rows[i] = found.taken, found.tokens, found.rows
            ask_s += found.ask_s
        return Guesses(choices, taken, tokens, rows, ask_s)

    def _best_guess(self, request: Asked, value: float, rate: float, price: float, number: int) -> _BestGuess:
        """Which lookup to ask for such a request, where a row is worth `price` and the draft that a guess makes
        needless gains `value` tokens; `number` requests share the call."""
        best, best_gain = _BestGuess(), 0.0
        for lookup, yields in self.lookups.items():
            if not _may_ask(lookup, request):
                continue
            alone_s = self.draft_costs[lookup](Drafted(number, 1, number)) / number
            guesses = zip(
                yields.shares(request.task),
                yields.lengths(request.task),
                yields.rates(request.task),
                strict=True,
            )
            worth = [(share, n, n * stands, n * (stands - price) - value) for share, n, stands in guesses]
            first = next((b for b in range(1, len(BUCKETS)) if worth[b][3] > 0), len(BUCKETS))
            gain = sum(share * max(more, 0.0) for share, _, _, more in worth[first:]) - rate * alone_s
            if gain > best_gain:
                best_gain = gain
                best = _BestGuess(
                    lookup,
                    BUCKETS[first],
                    sum(share for share, *_ in worth[first:]),
                    sum(share * stand for share, _, stand, _ in worth[first:]),
                    sum(share * n for share, n, *_ in worth[first:]),
                    alone_s,
                )
        return best

    def _offer(self, number: int, asked: Seq[Asked]) -> Offer:
        member, acceptance = self.members[number], self.acceptance[number]
        depth = member.max_depth if member.is_chain else 1
        tokens = np.full((len(asked), depth + 1), -np.inf)
        rows = np.zeros((len(asked), depth + 1))
        tokens[:, 0] = 0.0
        entry_s = np.zeros(len(asked))
        if member.looks_up:
            return Offer(tokens, rows, entry_s, self.draft_costs[number])
        token_s = self.draft_costs[number].missed_token_s
        shared: dict[str, tuple[list[float], tuple[float, float]]] = {}
        possible = [i for i, request in enumerate(asked) if _may_ask(number, request)]
        if possible and not self.draft_costs[number].is_known:  # one request finds out what it costs
            possible = [min(possible, key=lambda i: self._num_unseen(number, asked[i]))]
        for i in possible:
            request = asked[i]
            if acceptance.knows(request.sequence_id):
                worth = acceptance.worth(request.sequence_id, request.task)
            else:  # as its task
                if request.task not in shared:
                    shared[request.task] = acceptance.worth(request.sequence_id, request.task)
                worth = shared[request.task]
            entry_s[i] = self._num_unseen(number, request) * token_s / self._steps_left(request)
            if member.is_chain:
                most = min(depth, request.limit)
                tokens[i, 1 : most + 1] = np.cumsum(worth[0][:most])
                rows[i, 1 : most + 1] = np.arange(1, most + 1)
            else:
                accepted, checked = worth[1]
                tokens[i, 1], rows[i, 1] = min(accepted, request.limit), min(checked, request.limit)
        return Offer(tokens, rows, entry_s, self.draft_costs[number])

    def _num_unseen(self, member: int, request: Asked) -> int:
        """Tokens of a request's text that a drafter would have to compute first, where they are many."""
        _, seen = self._seen[member].get(request.sequence_id, (0, 0))
        unseen = request.length - seen
        return unseen if unseen >= MANY_MISSED else 0

    def _steps_left(self, request: Asked) -> float:
        """A careful guess: answers are as long as those of their task, and steps yield a token and a half."""
        usual = self._usual_length(request.task)
        return max(usual - request.num_output, 0.25 * usual, 4.0) / 1.5

    # --- probes and tries -------------------------------------------------------------------------------------

    def _begins_probe(self, asked: Seq[Asked], num_other_rows: int) -> bool:
        """Whether this step is the first of a few without drafts."""
        if self._credit_s["probe"] <= 0 or num_other_rows or self._try is not None:
            return False
        price_s = self._probe_price_s()
        if self._credit_s["probe"] < price_s or not self.realised.can_probe(len(asked)):
            return False
        self._pay("probe", price_s)
        return True

    def _probe_price_s(self) -> float:
        off_s = self._step_s.value  # not less than without drafts, and known without a calculation
        gain = self._gain or 1.5
        return NUM_OFF_STEPS * (off_s * max(0.02, 1 - 1 / gain) + self._books_s.value)

    def _consider_try(self, market: Market, plan: Plan, asked: Seq[Asked]) -> None:
        """Have the request of which least is known try what the plan does not give it, when there is credit for it."""
        if self._try is not None or self._credit_s["try"] <= 0 or plan.tokens_per_s <= 0:
            return
        found: tuple[float, int, int] | None = None
        for i, request in enumerate(asked):
            for number in range(len(self.members)):
                if plan.members[i] == number or not np.isfinite(market.offers[number].tokens[i, 1]):
                    continue
                mine, of_task, _ = self.acceptance[number].num_drafts(request.sequence_id, request.task)
                since = self._turn - self._last_try.get((request.sequence_id, number), -1000)
                score = since / (1.0 + mine + 0.1 * of_task)
                if found is None or score > found[0]:
                    found = score, i, number
        if found is None:
            return
        _, i, number = found
        members, depths = plan.members.copy(), plan.depths.copy()
        members[i], depths[i] = number, 1
        tried = market.price(members, depths)
        tokens = tried.tokens_per_s * tried.step_s
        price_s = TRY_STEPS * (max(0.0, tried.step_s - tokens / plan.tokens_per_s) + self._books_s.value)
        price_s += self._num_unseen(number, asked[i]) * self.draft_costs[number].missed_token_s
        # What costs more than can be saved up is tried too, and paid off afterwards: it may be cheaper than believed.
        if min(price_s, MAX_CREDIT_STEPS * self._step_s.value) <= self._credit_s["try"]:
            self._pay("try", price_s)
            self._last_try[asked[i].sequence_id, number] = self._turn
            self._try = _Try(asked[i].sequence_id, Choice(number, self._levels_asked(number, 1)))

    def _apply_try(self, trial: _Try, asked: Seq[Asked], choices: list[Choice]) -> None:
        trial.steps_left -= 1
        for i, request in enumerate(asked):
            if request.sequence_id == trial.sequence_id:
                choices[i] = self.bounded(trial.choice, request)
                self._tried = request.sequence_id
                break
        else:
            trial.steps_left = 0
        if trial.steps_left <= 0:
            self._try = None

    def _pay(self, what: str, price_s: float) -> None:
        self._credit_s[what] -= price_s
        self._probing_s += price_s

    # --- after a step -----------------------------------------------------------------------------------------

    def learn(self, facts: StepFacts) -> None:
        """What the step did and took."""
        self._tried, self.planning_s = None, 0.0
        if not 0 < facts.seconds < math.inf:
            self._is_steady = False
            return  # no step takes no time: a clock jumped
        for call in facts.calls:
            self.draft_costs[call.member].learn(call.drafted, self._num_missed[call.member], call.seconds)
        number = len(facts.gains)
        if number:
            self.cost.learn(
                num_sequences=number,
                num_rows=facts.num_rows,
                drafted=facts.num_drafted,
                checked=facts.num_checked,
                seconds=facts.undrafted_s,
            )
            if not self._in_probe:
                self._outcomes.extend(facts.outcomes)
                self._depths.append((number, facts.num_checked))
        passed, self._passed_s = self._passed_s, []
        for seconds in (*passed, facts.seconds):
            self._step_s.learn(seconds)
        self._earn(sum(passed) + facts.seconds, facts.num_drafted > 0)
        if facts.gains and not facts.num_others:
            compared = ComparedStep(number, facts.seconds, facts.gains, self._speculates)
            self.realised.learn(compared, self._in_probe)
            self._probe_left -= self._in_probe
        self._held_s -= facts.seconds
        self._books_s.learn(facts.books_s)
        self._repeats = min(int(self._books_s.value / (BOOKS_SHARE * self._step_s.value)), MAX_REPEATS)
        if (
            self._credit_s["probe"] > 0
            and self._credit_s["probe"] >= self._probe_price_s()
            and self._watches >= 1
        ):
            self._watches -= 1
            self._repeats = 0
        else:
            self._watches = min(self._watches + 0.1, float(NUM_ON_STEPS))
        self._is_steady = self._try is None and not self._in_probe
        if len(self._outcomes) >= MAX_UNLEARNED:
            self._work_in()

    def pass_by(self, seconds: float) -> None:
        """A step that repeated what was decided, and what it took."""
        self._repeats -= 1
        if 0 < seconds < math.inf:
            self._passed_s.append(seconds)
            self._held_s -= seconds

    def _earn(self, seconds: float, drafted: bool) -> None:
        """Credit for tries and probes."""
        self._total_s += seconds
        most_s = MAX_CREDIT_STEPS * self._step_s.value
        for_tries = 0.5 if drafted else 1.0  # without drafts there is nothing to probe
        for what, part in ("probe", 1 - for_tries), ("try", for_tries):
            credit_s = self._credit_s[what]
            self._credit_s[what] = min(credit_s + part * self.probe_share * seconds, max(credit_s, most_s))

    def _work_in(self) -> None:
        """Learn what was only kept so far."""
        drafts: dict[tuple[int, int, str], Drafts] = {}
        for outcome in self._outcomes:
            if outcome.member != NOBODY:
                key = outcome.member, outcome.sequence_id, outcome.task
                if key not in drafts:
                    drafts[key] = Drafts()
                drafts[key].add(outcome.num_checked, outcome.num_reached, outcome.num_accepted)
                self._num_steps[outcome.member] += 1
            if outcome.lookup in self.lookups:
                taken = outcome.member == outcome.lookup
                found, stood = (outcome.num_checked, outcome.num_accepted) if taken else (0, 0)
                self.lookups[outcome.lookup].learn(outcome.task, found, stood)
        for (member, sequence_id, task), each in drafts.items():
            self.acceptance[member].learn(sequence_id, task, each)
        for outcome in self._outcomes:
            self._use(outcome)
        for number, checked in self._depths:
            self._by_batch.setdefault(number, Mean()).learn(checked / number)
        gone, self._gone = self._gone, []
        self._outcomes, self._depths = [], []
        for sequence_id in gone:
            for acceptance in self.acceptance:
                acceptance.release(sequence_id)

    def score(self, lookup: int, task: str, num_found: int, num_stood: int) -> None:
        """What a draft that was never checked would have come to, seen from the text that came instead."""
        self.lookups[lookup].learn(task, num_found, num_stood)

    def may_score(self, member: int) -> bool:
        """Whether there is credit for asking a lookup what it would have guessed; pays for it."""
        price_s = self.draft_costs[member](Drafted(1, 1, 1))
        if not self.probe_share or self._credit_s["try"] < price_s:
            return False
        self._pay("try", price_s)
        return True

    def release(self, sequence_id: int, task: str, num_tokens: int | None) -> None:
        """The request is over, after `num_tokens` of answer; None where it will come back."""
        if num_tokens:
            self._length.learn(float(num_tokens))
            lengths = self._lengths.setdefault(task, Mean())
            lengths.learn(float(num_tokens))
            self._lengths.move_to_end(task)
            if len(self._lengths) > MAX_TASKS:
                self._lengths.popitem(last=False)
        self._chosen.pop(sequence_id, None)
        for number, seen in enumerate(self._seen):
            seen.pop(sequence_id, None)
            self._last_try.pop((sequence_id, number), None)
        self._gone.append(sequence_id)  # its last outcomes are still to be learned from

    def _forget_many(self) -> None:
        """Between two steps, when nothing of requests that are over is still to be learned from."""
        if len(self._gone) >= MAX_UNLEARNED:
            self._work_in()

    def _use(self, outcome: Outcome) -> None:
        use = self._tasks.get(outcome.task)
        if use is None:
            use = self._tasks[outcome.task] = _Use()
            if len(self._tasks) > MAX_TASKS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(outcome.task)
        use.depth.learn(float(outcome.num_checked))
        use.tokens.learn(float(outcome.num_tokens))

    # --- what is told -----------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        self._work_in()
        seen = [len(each) for each in self._seen]
        return max(len(self._chosen), *seen, *(acceptance.num_held for acceptance in self.acceptance))

    def report(self, num_failures: Seq[int] = (), retired: Seq[bool] = ()) -> ControlReport:
        """What is known now; the arguments are by member."""
        self._work_in()
        methods = tuple(
            MethodReport(
                name=member.name,
                acceptance_rate=self.acceptance[i].rate(),
                survival=tuple(self.acceptance[i].survival(-1, "")) if member.is_chain else (),
                num_steps=self._num_steps[i],
                num_failures=num_failures[i] if num_failures else 0,
                retired=retired[i] if retired else False,
            )
            for i, member in enumerate(self.members)
        )
        return ControlReport(
            adaptive=self.adaptive,
            speculating=any(use.depth.value > 0.05 for use in self._tasks.values()),
            estimated_speedup=self._gain,
            realised=self.realised.speedup(),
            probe_share=self._probing_s / self._total_s if self._total_s else 0.0,
            methods=methods,
            tasks=tuple(self._task_report(task, use) for task, use in self._tasks.items()),
            depth_by_batch=tuple((n, mean.value) for n, mean in sorted(self._by_batch.items())),
        )

    def _task_report(self, task: str, use: _Use) -> TaskReport:
        choice = self._of_task.get(task, NOTHING) if self.adaptive else Choice(0, 1)
        member = choice.lookup if choice.member == NOBODY else choice.member
        rates = [self.acceptance[m].rate(task) for m in range(len(self.members))]
        known = [rate for rate in rates if rate is not None]
        rate = rates[member] if member != NOBODY else max(known, default=None)
        return TaskReport(
            task=task,
            method=None if member == NOBODY else self.members[member].name,
            depth=use.depth.value,
            acceptance_rate=rate,
            acceptance_length=use.tokens.value or None,
            break_even=self._break_even(max(member, 0)),
            estimated_speedup=self._gains.get(task, self._gain),
            realised=self.realised.speedup(task),
        )

    def _break_even(self, member: int) -> float | None:
        """The α from which on one draft token pays, at batches as they are lately."""
        number = max(self._planned_for, 1)
        plain_s = self.cost.step_s(number, number, 0, 0)
        if plain_s <= 0 or not self.draft_costs[member].is_known:
            return None
        draft_s = self.draft_costs[member](Drafted(number, 1, number))
        return break_even(1, (self.cost.step_s(number, 2 * number, number, number) + draft_s) / plain_s)


def _may_ask(member: int, request: Asked) -> bool:
    return request.limit > 0 and (request.members is None or member in request.members)


def _most_common(choices: Seq[Choice]) -> Choice:
    """The one that was made most often; of several the first."""
    return Counter(choices).most_common(1)[0][0]
