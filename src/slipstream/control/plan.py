"""Who is drafted for by whom and how deep, so that a step yields the most tokens a second.

What is maximised is goodput, expected tokens over expected time (Liu et al., "Optimizing speculative decoding for
serving large language models using goodput", 2024), request by request. At the best ratio λ the best plan also
maximises tokens - λ * time (Dinkelbach 1967), which falls apart into requests as far as times are sums. So candidates
are made for each request at the going λ, beside the plain ones that treat all alike, each is priced with the real
costs, and the best stays. Lookups are asked before drafters, so what a draft is worth depends on what they leave to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.control.step_cost import DraftCost, Drafted, StepCost
from slipstream.draft.choice import NOBODY

SHARES = 0.0, 0.5
"""Of the requests, that may be thought to share a drafter's calls."""
WORTH_ANOTHER_TURN = 1.001
"""So much better a plan must have become for another turn to be taken: turns take time themselves."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one drafter could do for each of the requests."""

    tokens: NDArray[np.float64]
    """[requests, 1 + depths]: tokens expected to stand from a draft of 0, 1, … levels; -inf where that may not be. A
    drafter that is taken as it comes has one level."""
    rows: NDArray[np.float64]
    """[requests, 1 + depths]: draft tokens that the target is then expected to check."""
    entry_s: NDArray[np.float64]
    """[requests]: a step's share of the seconds that it takes the drafter to compute the text that it has missed."""
    cost: DraftCost

    @property
    def max_depth(self) -> int:
        return int(self.tokens.shape[1]) - 1


@dataclass(frozen=True, slots=True)
class Guesses:
    """What lookups do, which are asked before the drafters; a guess that is long enough takes the draft's place."""

    choices: list[tuple[int, int]]
    """By request: the lookup, or `NOBODY`, and the shortest guess of it that is taken."""
    taken: NDArray[np.float64]
    """[requests]: the chance that a guess is taken."""
    tokens: NDArray[np.float64]
    """[requests]: tokens expected to stand from guesses, those that are not taken counted as none."""
    rows: NDArray[np.float64]
    """[requests]: draft tokens that the target is then expected to check, likewise."""
    ask_s: float
    """Seconds of asking."""

    @classmethod
    def none(cls, num_requests: int) -> Guesses:
        """Nobody is asked."""
        zeros = np.zeros(num_requests)
        return cls([(NOBODY, 0)] * num_requests, zeros, zeros, zeros, 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One answer to the question."""

    members: NDArray[np.int64]
    """[requests]: who drafts, or `NOBODY`."""
    depths: NDArray[np.int64]
    """[requests]: levels; 0 for `NOBODY`."""
    guesses: Guesses
    tokens_per_s: float
    """Expected, of all requests together."""
    step_s: float
    """Expected."""


class Marginal(NamedTuple):
    """Seconds of a little more, beside a plan."""

    row_s: float
    """Of one more draft token in the pass."""
    drafted_s: float
    """Of one more request that has any, if all have."""
    share_s: list[float]
    """By drafter, of a request's share of its calls."""


class Market:
    """The requests of a step, what each drafter offers them, and what all of it costs."""

    def __init__(self, offers: Seq[Offer], cost: StepCost, num_requests: int, num_other_rows: float) -> None:
        """`num_other_rows` of the pass belong to prompts. How many of those there are depends on the requests and not
        on how they are drafted for, so their own time does not count; that a pass is fuller for them does."""
        self.offers = offers
        self._cost = cost
        self._number = num_requests
        self._other = num_other_rows
        alone_s = cost.step_s(num_requests, num_requests, 0, 0)
        self._other_s = cost.step_s(num_requests, num_requests + num_other_rows, 0, 0) - alone_s
        self._no_guesses = Guesses.none(num_requests)

    def price(
        self, members: NDArray[np.int64], depths: NDArray[np.int64], guesses: Guesses | None = None
    ) -> Plan:
        """Tokens a second of a plan, with the real costs."""
        guesses = guesses or self._no_guesses
        left = 1.0 - guesses.taken  # the chance that a draft is needed at all
        tokens = self._number + float(guesses.tokens.sum())
        rows, drafted = float(guesses.rows.sum()), float(guesses.taken.sum())
        draft_s = guesses.ask_s
        for number, offer in enumerate(self.offers):
            (mine,) = (members == number).nonzero()
            if not len(mine):
                continue
            levels = depths[mine]
            tokens += float((left[mine] * offer.tokens[mine, levels]).sum())
            rows += float((left[mine] * offer.rows[mine, levels]).sum())
            drafted += float(left[mine].sum())
            draft_s += _calls_s(offer, left[mine], levels) + float(offer.entry_s[mine].sum())
        num_rows = self._number + self._other + rows
        step_s = self._cost.step_s(self._number, num_rows, drafted, rows) - self._other_s + draft_s
        return Plan(members, depths, guesses, tokens / step_s if step_s > 0 else 0.0, step_s)

    def nothing(self, guesses: Guesses | None = None) -> Plan:
        """Without drafts."""
        none = np.full(self._number, NOBODY), np.zeros(self._number, dtype=np.int64)
        return self.price(*none, guesses)

    def best(self, look: Callable[[Plan], Guesses] | None = None) -> Plan:
        """The best of doing nothing, of one drafter and depth for all, and of a choice for each.

        `look` says what lookups had better do beside a plan and at its rate; better guesses make time dearer, which
        makes drafts worth less, so the two are found in turns.
        """
        best = max([self.nothing(), *self._uniform()], key=_value)
        shares = SHARES[:1] if self._number <= 2 else SHARES
        for _ in range(3):
            guesses = look(best) if look else None
            plans = [self._each(best, share, guesses) for share in shares]
            if look:
                plans += [self.price(best.members, best.depths, guesses), self.nothing(guesses)]
            better = max(plans, key=_value)
            if better.tokens_per_s <= best.tokens_per_s * WORTH_ANOTHER_TURN:
                break
            best = better
        return best

    def _uniform(self) -> Iterator[Plan]:
        """Everybody by the same drafter, as deep as each may."""
        for number, offer in enumerate(self.offers):
            possible = np.isfinite(offer.tokens).sum(axis=1) - 1
            if not possible.any():
                continue
            for depth in range(1, offer.max_depth + 1):
                depths = np.minimum(possible, depth)
                yield self.price(np.where(depths > 0, number, NOBODY), depths)

    def _each(self, going: Plan, share: float, guesses: Guesses | None) -> Plan:
        """Each request takes what is best for it at the going rate; calls and levels are shared by as many as now, and
        by `share` of the requests at least."""
        rate = going.tokens_per_s
        row_s, drafted_s, _ = self.marginal(going)
        scores, places = [np.zeros(self._number)], [np.zeros(self._number, dtype=np.int64)]
        for number, offer in enumerate(self.offers):
            sharing = max(int((going.members == number).sum()), share * self._number, 1.0)
            draft_s = offer.cost.by_level(sharing, offer.max_depth)
            entry_s = np.repeat(offer.entry_s[:, None] + drafted_s, offer.max_depth + 1, axis=1)
            entry_s[:, 0] = 0.0
            score = offer.tokens - rate * (offer.rows * row_s + draft_s + entry_s)
            place = score.argmax(axis=1)
            places.append(place)
            scores.append(score[np.arange(self._number), place])
        chosen = np.argmax(scores, axis=0)
        depths = np.asarray(places)[chosen, np.arange(self._number)]
        return self.price(np.where(depths > 0, chosen - 1, NOBODY), depths, guesses)

    def marginal(self, going: Plan) -> Marginal:
        """What a little more costs beside `going`."""
        left = 1.0 - going.guesses.taken
        rows, drafted, shares = float(going.guesses.rows.sum()), float(going.guesses.taken.sum()), []
        for number, offer in enumerate(self.offers):
            (mine,) = (going.members == number).nonzero()
            levels = going.depths[mine]
            rows += float((left[mine] * offer.rows[mine, levels]).sum())
            needed = float(left[mine].sum())
            drafted += needed
            shares.append(_calls_s(offer, left[mine], levels) / needed if needed > 0 else 0.0)
        base = self._number + self._other + rows
        more = max(1.0, 0.25 * self._number)
        before = self._cost.step_s(self._number, base, drafted, rows)
        with_rows = self._cost.step_s(self._number, base + more, drafted, rows + more)
        nobody, everybody = (
            self._cost.step_s(self._number, base, each, rows) for each in (0.0, self._number)
        )
        return Marginal((with_rows - before) / more, (everybody - nobody) / self._number, shares)

    def tokens(self, plan: Plan) -> list[float]:
        """By request, the tokens that a step is expected to yield."""
        left = 1.0 - plan.guesses.taken
        found: list[float] = (1.0 + plan.guesses.tokens).tolist()
        for i, (number, depth) in enumerate(zip(plan.members.tolist(), plan.depths.tolist(), strict=True)):
            if number != NOBODY:
                found[i] += float(left[i] * self.offers[number].tokens[i, depth])
        return found

    def values(self, plan: Plan) -> list[float]:
        """By request, the tokens that its draft gains beyond what its time is worth at the plan's rate; 0 without."""
        row_s, drafted_s, shares_s = self.marginal(plan)
        rate = plan.tokens_per_s
        found = []
        for i, (number, depth) in enumerate(zip(plan.members.tolist(), plan.depths.tolist(), strict=True)):
            if number == NOBODY:
                found.append(0.0)
                continue
            offer = self.offers[number]
            cost_s = (
                float(offer.rows[i, depth]) * row_s + drafted_s + shares_s[number] + float(offer.entry_s[i])
            )
            found.append(float(offer.tokens[i, depth]) - rate * cost_s)
        return found


def _calls_s(offer: Offer, left: NDArray[np.float64], levels: NDArray[np.int64]) -> float:
    """Seconds of a drafter's calls for requests of which each needs it by its chance `left`."""
    needed = float(left.sum())
    if needed <= 0:
        return 0.0
    number = max(needed, 1.0)  # a call is for one at least; it is made by the chance that there is one
    mean = float((left * levels).sum()) / needed
    return min(needed, 1.0) * offer.cost(Drafted(number, int(levels.max()), number * mean))


def _value(plan: Plan) -> float:
    return plan.tokens_per_s
