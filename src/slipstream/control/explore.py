"""What is not chosen is not forgotten: trials and probes, paid out of one budget, and what they show.

A *trial* gives one request a drafter that the plan does not give it, for a few steps: that keeps its acceptance and
costs known. A *probe* does a few steps the other way for all requests, without drafts where there are some: beside the
steps just before, they show what speculation really gains. Where drafts measurably lose at some load, whatever they
are estimated to gain, nothing is drafted there until they measurably gain.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.control.cost import Mean
from slipstream.control.student import quantile
from slipstream.control.types import MAX_TASKS, Choice, Outcome, Speedup, StepRequest
from slipstream.core.bounded import BoundedDict

logger = logging.getLogger(__name__)

MAX_CREDIT_STEPS = 32
"""Steps' worth of credit that can be saved up."""
NUM_OFF_STEPS = 4
"""Steps of a probe; the first is not counted, because it still pays for what the step before it left."""
NUM_BACK_STEPS = 9
"""Steps of a probe with drafts, where there are none otherwise. Its first pays for beginning."""
NUM_ON_STEPS = 16
"""Steps before a probe that it is compared with, at most; half of them at least."""
USUAL_GAIN = 1.5
"""Gain of drafts that is assumed before anything is estimated."""
NUM_TRIAL_STEPS = 3
"""Steps of a trial, each of one level: the first token says the most for its price."""
MAX_TRIAL_STEPS = 12
"""Steps of a trial that goes on."""
SURPRISE = 0.3
"""By how much more must be accepted than expected for a trial to go on."""
MIN_LOSS = 0.02
"""Loss of a step in a probe, at least: doing otherwise is never free."""
MAX_PAIRS = 200
"""Pairs that are kept of each task."""
MIN_PAIRS = 3
"""Fewer give no interval."""
RECENT_PAIRS = 24
"""Pairs of one load by which it is decided whether to stand back."""
MAX_DIFFERENCE = 0.1
"""Between the batches of a pair, as a share."""


class Budget:
    """A fixed share of the time, for trials and probes together; prices are estimated and paid at once.

    The cost of exploration is bounded by it, whatever the traffic. Whichever kind has cost less so far comes first.
    """

    def __init__(self, share: float, step_s: Mean) -> None:
        """`step_s` learns what steps take."""
        self.share = share
        self.total_s = self.credit_s = 0.0
        self._spent_s = {"trial": 0.0, "probe": 0.0}
        self._wanted_s = {"trial": 0.0, "probe": 0.0}
        """What the next one of each kind would cost; 0 where none is wanted."""
        self._step_s = step_s

    @property
    def spent_s(self) -> float:
        return sum(self._spent_s.values())

    @property
    def max_credit_s(self) -> float:
        """What can be saved up."""
        return MAX_CREDIT_STEPS * self._step_s.value

    def can_pay(self, kind: str, price_s: float) -> bool:
        """Whether there is credit for it, and for one of the other kind where that is behind."""
        self._wanted_s[kind] = price_s
        return self.credit_s > 0 and self.credit_s >= self._needed_s(kind, price_s)

    def wait_s(self, kind: str, price_s: float) -> float | None:
        """Seconds of steps until there is credit for it; None where none is ever earned."""
        if not self.share:
            return None
        return max(0.0, self._needed_s(kind, price_s) - self.credit_s) / self.share

    def _needed_s(self, kind: str, price_s: float) -> float:
        other = "probe" if kind == "trial" else "trial"
        reserve_s = self._wanted_s[other] if self._spent_s[kind] > self._spent_s[other] else 0.0
        return min(price_s + reserve_s, self.max_credit_s)

    def withdraw(self, kind: str) -> None:
        """Nothing of this kind is to be done now."""
        self._wanted_s[kind] = 0.0

    def pay(self, kind: str, price_s: float) -> None:
        self.charge(kind, price_s)
        self._wanted_s[kind] = 0.0

    def charge(self, kind: str, price_s: float) -> None:
        """As `pay`, for something beside what is wanted of this kind."""
        self.credit_s -= price_s
        self._spent_s[kind] += price_s

    def earn(self, seconds: float) -> None:
        """A share of what a step took."""
        self.total_s += seconds
        self.credit_s = min(self.credit_s + self.share * seconds, max(self.credit_s, self.max_credit_s))


# --- the realised gain ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step that only decoded."""

    num_sequences: int
    seconds: float
    outcomes: Seq[Outcome]
    """One outcome a sequence; may be empty in a step without drafts."""
    speculates: bool
    """Whether drafts were allowed: a step in which no drafter had a proposal is what speculation makes of it, too."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One probe of one task."""

    on_tokens: float
    """Tokens that a sequence gained in a step with speculation."""
    on_s: float
    """Seconds of a step with speculation."""
    off_s: float
    """And of one without, in which a sequence gains one token."""


class Realised:
    """Pairs of neighbouring steps of batches of about one size, with drafts and without, by task: neither the machine's
    mood nor the load is in their ratio."""

    def __init__(self) -> None:
        self._before: deque[Step] = deque(maxlen=NUM_ON_STEPS)
        self._probe: list[Step] = []
        self._pairs = BoundedDict[str, deque[Pair]](MAX_TASKS)
        self._all: deque[Pair] = deque(maxlen=MAX_PAIRS)

    def can_probe(self, num_sequences: int, with_drafts: bool = False) -> bool:
        """True where the steps just made give a fair comparison with a probe."""
        return len(self._fair(num_sequences, not with_drafts)) >= NUM_ON_STEPS // 2

    def learn(self, step: Step, in_probe: bool, with_drafts: bool = False) -> Pair | None:
        """One step, and whether it was part of a probe; the pair of all tasks, where it ended one."""
        if not in_probe:
            self._before.append(step)
            return None
        self._probe.append(step)
        if len(self._probe) < (NUM_BACK_STEPS if with_drafts else NUM_OFF_STEPS):
            return None
        return self._close(with_drafts)

    def give_up(self) -> None:
        """The probe cannot be finished: what ran was not what is compared."""
        self._probe = []

    def speedup(self, task: str | None = None) -> Speedup | None:
        """Return the speedup of a task, or of all; None before there are pairs enough."""
        return ratio_of(list(self._all if task is None else self._pairs.get(task, ())))

    def num_pairs(self, task: str | None = None) -> int:
        """Pairs of a task, or of all, that are kept."""
        return len(self._all if task is None else self._pairs.get(task, ()))

    def _close(self, with_drafts: bool) -> Pair | None:
        number, least = self._probe[0].num_sequences, len(self._probe) - 1
        probed = [
            step
            for step in self._probe[1:]
            if step.num_sequences == number and step.speculates == with_drafts
        ]
        before = self._fair(number, not with_drafts)
        self._probe = []
        self._before.clear()
        if len(probed) < least or len(before) < NUM_ON_STEPS // 2:
            return None
        on, off = (probed, before) if with_drafts else (before, probed)
        on_s, off_s = _mean([step.seconds for step in on]), _mean([step.seconds for step in off])
        tokens: dict[str, list[int]] = {}
        for step in on:
            for outcome in step.outcomes:
                tokens.setdefault(outcome.task, []).append(outcome.num_tokens)
        for task, of_task in tokens.items():
            pairs = self._pairs.touch(task, lambda: deque(maxlen=MAX_PAIRS))
            pairs.append(Pair(_mean(of_task), on_s, off_s))
        pair = Pair(_mean([number for of_task in tokens.values() for number in of_task]), on_s, off_s)
        self._all.append(pair)
        return pair

    def _fair(self, num_sequences: int, speculates: bool) -> list[Step]:
        """Steps before, with speculation or without, of about so many sequences."""
        most = MAX_DIFFERENCE * num_sequences
        return [
            step
            for step in self._before
            if step.speculates == speculates and abs(step.num_sequences - num_sequences) <= most
        ]


def ratio_of(pairs: Seq[Pair]) -> Speedup | None:
    """The ratio of the sums, with a 95 % interval by the delta method over pairs, each of which is its own sample.

    They may be few, so the interval is Student's.
    """
    if len(pairs) < MIN_PAIRS:
        return None
    # A pair's two sides are put on one scale by its own off steps, so that large and small batches count alike.
    tokens = [pair.on_tokens for pair in pairs]
    costs = [pair.on_s / pair.off_s for pair in pairs]
    ratio = sum(tokens) / sum(costs)
    mean_tokens, mean_cost = _mean(tokens), _mean(costs)
    spread = [t / mean_tokens - c / mean_cost for t, c in zip(tokens, costs, strict=True)]
    error = math.sqrt(sum(s * s for s in spread) / (len(pairs) - 1) / len(pairs))
    width = math.exp(quantile(len(pairs) - 1, 0.975) * error)
    return Speedup(ratio, ratio / width, ratio * width, len(pairs))


def _mean(values: Seq[float]) -> float:
    return sum(values) / len(values)


class Probes:
    """When a probe begins, how long it goes on, and what it costs."""

    def __init__(self, budget: Budget, step_s: Mean) -> None:
        """`step_s` is what steps take."""
        self.realised = Realised()
        self.is_active = False
        """This step is one of a probe."""
        self.with_drafts = False
        """The probe at hand, or the last one, has drafts: there were none before it."""
        self._num_requests = 0
        self._budget, self._step_s = budget, step_s
        self._left = 0
        self._made: list[tuple[float, float]] = []
        """Seconds of each of the probe's steps and the tokens that a sequence gained."""
        self._paid_s = 0.0

    @property
    def rests(self) -> bool:
        """This step has no drafts, to measure what they gain."""
        return self.is_active and not self.with_drafts

    def choose(
        self, num_requests: int, num_prompt_rows: int, price_s: float | None, *, with_drafts: bool
    ) -> bool:
        """Before a step: whether it is one of a probe. One may begin for `price_s`, which can be paid, unless None."""
        if self._left and (num_prompt_rows or num_requests != self._num_requests):
            self.give_up()  # what runs now is not what it would be compared with
        if not self._left and price_s is not None:
            self._budget.pay("probe", price_s)
            self.with_drafts, self._num_requests, self._paid_s = with_drafts, num_requests, price_s
            self._left = NUM_BACK_STEPS if with_drafts else NUM_OFF_STEPS
        self.is_active = self._left > 0
        return self.is_active

    def price_s(self, gain: float | None) -> float:
        """Seconds that a probe without drafts costs, where they gain as much."""
        # The time of a step is not less than without drafts, and is known without a calculation.
        return NUM_OFF_STEPS * self._step_s.value * max(MIN_LOSS, 1 - 1 / (gain or USUAL_GAIN))

    def back_price_s(self, lost: float) -> float:
        """Seconds that a probe with drafts costs, where each of its steps loses so many steps' time. What costs more
        than can be saved up is paid off afterwards."""
        return min(NUM_BACK_STEPS * self._step_s.value * max(MIN_LOSS, lost), self._budget.max_credit_s)

    def give_up(self) -> None:
        """It cannot be finished."""
        self._left, self.is_active = 0, False
        self._made = []
        self.realised.give_up()

    def learn(self, step: Step) -> Pair | None:
        """A step that only decoded; the pair, where it ended a probe."""
        pair = self.realised.learn(step, self.is_active, self.with_drafts)
        if self.is_active:
            self._left -= 1
            gained = [outcome.num_tokens for outcome in step.outcomes]
            self._made.append((step.seconds, _mean(gained) if gained else 1.0))
            if not self._left:
                self._settle(pair)
        return pair

    def _settle(self, pair: Pair | None) -> None:
        """Pay what the probe cost beyond its price: drafts may gain more than was estimated, and drafters that begin
        may have long texts to compute first."""
        if pair is not None:
            usual_s = pair.off_s if self.with_drafts else pair.on_s / pair.on_tokens  # of a token, else
            cost_s = sum(seconds - tokens * usual_s for seconds, tokens in self._made)
            self._budget.pay("probe", max(0.0, cost_s - self._paid_s))
        self._made = []


@dataclass(slots=True)
class _Load:
    """What is known of batches of about one size, since it was last decided there."""

    pairs: deque[Pair] = field(default_factory=lambda: deque(maxlen=RECENT_PAIRS))
    active: bool = False
    needed_gain: float = math.inf
    """While active: an estimate that makes up for what the last one promised too much."""
    lost: float = 0.0
    """While active: what a step with drafts costs beyond what it yields, in steps without."""


class StandBack:
    """Says at which loads nothing is drafted. It decides on an interval only, and then begins with no pairs: either way
    takes new evidence, which prevents oscillation."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def is_active(self, num_requests: int) -> bool:
        """True where nothing is drafted for as many."""
        load = self._loads.get(_level(num_requests))
        return load is not None and load.active

    def lost(self, num_requests: int) -> float:
        """While active, what a step with drafts costs beyond its yield, in steps without; never below 0. 0 where
        nothing is known."""
        load = self._loads.get(_level(num_requests))
        return 0.0 if load is None else load.lost

    def gain(self, num_requests: int) -> float | None:
        """What drafts made there recently; None before there are pairs. A single pair is no conclusion."""
        load = self._loads.get(_level(num_requests))
        if load is None or not load.pairs:
            return None
        return sum(p.on_tokens for p in load.pairs) / sum(p.on_s / p.off_s for p in load.pairs)

    def learn(self, num_requests: int, pair: Pair, estimated: float) -> bool:
        """One pair, and what drafts were estimated to gain then; True where it changes what is done."""
        load = self._loads.setdefault(_level(num_requests), _Load())
        load.pairs.append(pair)
        found = ratio_of(list(load.pairs))
        if load.active:
            load.lost = _lost(load)
        if found is None or (found.low <= 1 if load.active else found.high >= 1):
            return False
        load.active = not load.active
        load.needed_gain = max(estimated, 1.0) / found.ratio
        load.lost = _lost(load)
        load.pairs.clear()
        logger.info(
            "auto %s: with about %d requests drafts make %.2f (%.2f to %.2f) of the speed without them, estimated %.2f",
            "suspends drafts" if load.active else "resumes drafts",
            num_requests,
            found.ratio,
            found.low,
            found.high,
            estimated,
        )
        return True

    def trusts(self, num_requests: int, estimated: float) -> bool:
        """End it where drafts are now estimated to gain more than the last estimate was wrong by: the traffic is
        another. True where it ended."""
        load = self._loads[_level(num_requests)]
        if estimated <= load.needed_gain:
            return False
        load.active = False
        load.pairs.clear()
        logger.info(
            "auto resumes drafts: with about %d requests drafts are estimated to make %.2f of the speed without them, "
            "more than the %.2f that makes up for the estimate before",
            num_requests,
            estimated,
            load.needed_gain,
        )
        return True


def _lost(load: _Load) -> float:
    return max(0.0, _mean([pair.on_s / pair.off_s - pair.on_tokens for pair in load.pairs]))


def _level(num_requests: int) -> int:
    """Batches of one level differ by less than a factor of two, as 6 and 11 do."""
    return round(math.log2(max(num_requests, 1)))


# --- trials ---------------------------------------------------------------------------------------------------


class Trials:
    """One request at a time is given a drafter that the plan does not give it. A trial in which much more is accepted
    than expected goes on: a change is then found within one trial instead of several."""

    def __init__(self) -> None:
        self._sequence_id: int | None = None
        self._choices: list[Choice] = []
        """Choices for the steps to come, the last one first."""
        self._given: Choice | None = None
        """In this step."""
        self._num_drafts = self._num_accepted = 0
        """Drafts of the trial, and those of which a token was accepted."""
        self._last = BoundedDict[tuple[str, int], int](MAX_TASKS)
        """Task and drafter to the step of the last trial."""

    @property
    def under_way(self) -> bool:
        return bool(self._choices)

    def age(self, task: str, drafter: int, step: int) -> int:
        """Steps since the drafter was tried for the task."""
        return step - self._last.get((task, drafter), -1000)

    def begin(self, request: StepRequest, choices: Seq[Choice], step: int) -> None:
        """Let a request have a choice a step."""
        self._sequence_id, self._choices = request.sequence_id, list(choices)[::-1]
        self._num_drafts = self._num_accepted = 0
        self._last[request.task, choices[0].drafter] = step

    def choice(self, requests: Seq[StepRequest]) -> tuple[int, Choice] | None:
        """In a step while one is under way: the place of its request, and its choice."""
        self._given = None
        if not self._choices:
            return None
        place = next((i for i, each in enumerate(requests) if each.sequence_id == self._sequence_id), None)
        if place is None:
            self._choices = []
            return None
        self._given = self._choices.pop()
        return place, self._given

    def outcome(self, outcomes: Seq[Outcome]) -> Outcome | None:
        """What this step's trial came to, if there was one."""
        given = self._given
        if given is None:
            return None
        found = (o for o in outcomes if o.sequence_id == self._sequence_id and o.drafter == given.drafter)
        return next(found, None)

    def goes_on(self, outcome: Outcome, expected: float) -> bool:
        """After a step: whether a trial that was over goes on. `expected` is the chance that a first token is accepted
        by what is known."""
        self._num_drafts += 1
        self._num_accepted += outcome.num_accepted > 0
        share = self._num_accepted / self._num_drafts
        if self._choices or self._given is None or self._num_drafts >= MAX_TRIAL_STEPS:
            return False
        if share < expected + SURPRISE:
            return False
        self._choices = [self._given] * NUM_TRIAL_STEPS
        return True
