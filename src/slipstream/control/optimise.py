"""Which drafter drafts for each request, and how deep, so that a step yields the most tokens a second.

What is maximised is goodput, expected tokens over expected time (Liu et al., "Optimizing speculative decoding for
serving large language models using goodput", 2024). At the best ratio λ the best plan also maximises tokens - λ * time
(Dinkelbach 1967), which falls apart into requests as far as times are sums. So candidates are the plans that treat all
alike, and those in which each request takes what is best for it at the rate of the best plan so far; each is priced
with all costs, and the best one is kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.control.acceptance import BUCKETS, Acceptance, LookupYield
from slipstream.control.cost import DraftCost, StepCost
from slipstream.control.types import NO_DRAFTER, Choice, DraftCall, PolicyDrafter, StepRequest

MAX_ROUNDS = 3
WORTH_ANOTHER_ROUND = 1.001
"""So much better a plan must have become for another round: rounds take time themselves."""
SHARING = 0.0, 0.5
"""Parts of the requests that a drafter's calls may be expected to be shared by."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """What one drafter can do for one request."""

    tokens: Seq[float]
    """Entry i: tokens expected to be accepted of i + 1 levels, as far as the request may have them. A drafter whose
    size is not chosen has one entry."""
    rows: Seq[float]
    """Draft tokens that the target is then expected to check."""
    entry_s: float = 0.0
    """A step's share of what it takes the drafter to compute the text that it has missed."""

    @classmethod
    def of(cls, traits: PolicyDrafter, known: Acceptance, request: StepRequest, entry_s: float) -> Curve:
        """By what is known of a request, or of its task and texts of its length."""
        of_request, limit = (request.sequence_id, request.task, request.length), request.limit
        if traits.is_chain:
            tokens = np.cumsum(known.survival(*of_request)[:limit]).tolist()
            return cls(tokens, range(1, len(tokens) + 1), entry_s)
        accepted, checked = known.per_draft(*of_request)
        return cls([min(accepted, limit)], [min(checked, limit)], entry_s)


@dataclass(frozen=True, slots=True)
class LookupCurve:
    """What one lookup can do for one request; entry i is for proposals of at least `BUCKETS[i + 1]` tokens."""

    used: Floats
    """The chance that a proposal is long enough."""
    tokens: Floats
    """Expected to be accepted."""
    rows: Floats
    """Expected to be checked."""

    @classmethod
    def of(cls, known: LookupYield, task: str) -> LookupCurve:
        """By what is known of a task."""
        shares, lengths, rates = (
            np.array(each[1:]) for each in (known.shares(task), known.lengths(task), known.rates(task))
        )

        def from_here(values: Floats) -> Floats:
            return np.asarray(values[::-1].cumsum()[::-1])

        return cls(from_here(shares), from_here(shares * lengths * rates), from_here(shares * lengths))


class Row(NamedTuple):
    """A request: what each drafter and each lookup, by number, could do for it; those that may not are absent."""

    curves: dict[int, Curve]
    lookups: dict[int, LookupCurve]


class Priced(NamedTuple):
    """A plan: for each row the place of its option, and what a step is then expected to yield."""

    places: NDArray[np.int64]
    tokens_per_s: float
    step_s: float


class Problem:
    """The requests of a step, what could be done for each, and what all of it costs."""

    def __init__(
        self, rows: Seq[Row], step_cost: StepCost, draft_costs: Seq[DraftCost], num_prompt_rows: float = 0.0
    ) -> None:
        """`num_prompt_rows` more are in the pass. Their own time does not depend on drafts and is left out; that the
        pass is fuller for them is not."""
        self.number = len(rows)
        self._step_cost, self._draft_costs, self._num_prompt_rows = step_cost, draft_costs, num_prompt_rows
        alone_s = step_cost.step_s(self.number, self.number, 0, 0)
        self._prompts_s = step_cost.step_s(self.number, self.number + num_prompt_rows, 0, 0) - alone_s
        depths: dict[int, int] = {}
        for row in rows:
            for drafter, curve in row.curves.items():
                depths[drafter] = max(depths.get(drafter, 0), len(curve.tokens))
        drafts = [(drafter, level) for drafter in sorted(depths) for level in range(1, depths[drafter] + 1)]
        looks = [
            (n, least) for n in sorted({n for row in rows for n in row.lookups}) for least in BUCKETS[1:]
        ]
        self._depths = depths
        self._lay_out([(NO_DRAFTER, 0), *looks], [(NO_DRAFTER, 0), *drafts], rows)

    def _lay_out(self, looks: Seq[tuple[int, int]], drafts: Seq[tuple[int, int]], rows: Seq[Row]) -> None:
        """Every option, a lookup and a draft behind it, for every row: [rows, options]."""
        draft = np.zeros((4, self.number, len(drafts)))  # tokens, rows, whether any, entry_s
        look = np.zeros((3, self.number, len(looks)))  # tokens, rows, the chance that it is used
        for i, row in enumerate(rows):
            for place, (drafter, level) in enumerate(drafts):
                curve = row.curves.get(drafter)
                if curve is not None and curve.tokens:
                    level = min(level, len(curve.tokens))
                    draft[:, i, place] = curve.tokens[level - 1], curve.rows[level - 1], 1.0, curve.entry_s
            for place in range(1, len(looks), len(BUCKETS) - 1):
                found = row.lookups.get(looks[place][0])
                if found is not None:
                    look[:, i, place : place + len(BUCKETS) - 1] = found.tokens, found.rows, found.used
        left = 1.0 - look[2][:, :, None]  # the chance that the draft is needed
        self.options = [Choice(*draft_, *look_) for look_ in looks for draft_ in drafts]
        self._places = {option: place for place, option in enumerate(self.options)}
        shape = self.number, len(self.options)
        self._tokens = (look[0][:, :, None] + left * draft[0][:, None, :]).reshape(shape)
        self._rows = (look[1][:, :, None] + left * draft[1][:, None, :]).reshape(shape)
        self._needed = (left * draft[2][:, None, :]).reshape(shape)
        self._num_drafts = len(drafts)
        self._used = np.repeat(look[2], len(drafts), axis=1)
        self._drafted = self._needed + self._used
        self._entry_s = np.tile(draft[3], len(looks))
        self._drafter = np.array([option.drafter for option in self.options])
        self._level = np.array([float(option.depth) for option in self.options])
        self._lookup = np.array([option.lookup for option in self.options])
        self._drafters = sorted({drafter for drafter, _ in drafts[1:]})
        self._lookups = sorted({lookup for lookup, _ in looks[1:]})

    # --- prices -----------------------------------------------------------------------------------------------

    def price(self, places: NDArray[np.int64]) -> Priced:
        """A plan with all its costs."""
        every = np.arange(self.number)
        rows, drafted = float(self._rows[every, places].sum()), float(self._drafted[every, places].sum())
        draft_s = float(self._entry_s[every, places].sum())
        drafters, lookups = self._drafter[places], self._lookup[places]
        for drafter in self._drafters:
            (mine,) = (drafters == drafter).nonzero()
            if len(mine):
                draft_s += self._call_s(drafter, self._needed[mine, places[mine]], self._level[places[mine]])
        for lookup in self._lookups:
            num_calls = int((lookups == lookup).sum())
            if num_calls:
                draft_s += float(self._draft_costs[lookup](DraftCall(num_calls, 1, num_calls)))
        return self._priced(places, float(self._tokens[every, places].sum()), rows, drafted, draft_s)

    def _priced(
        self, places: NDArray[np.int64], tokens: float, rows: float, drafted: float, draft_s: float
    ) -> Priced:
        in_pass = self.number + self._num_prompt_rows + rows
        step_s = self._step_cost.step_s(self.number, in_pass, drafted, rows) - self._prompts_s + draft_s
        return Priced(places, (self.number + tokens) / step_s if step_s > 0 else 0.0, float(step_s))

    def _call_s(self, drafter: int, needed: Floats, levels: Floats) -> float:
        """Seconds of a drafter's calls for requests of which each needs it by its chance."""
        total = float(needed.sum())
        if total <= 0:
            return 0.0
        number = max(total, 1.0)  # a call is for one at least; it is made by the chance that there is one
        mean = float((needed * levels).sum()) / total
        return min(total, 1.0) * float(
            self._draft_costs[drafter](DraftCall(number, levels.max(), number * mean))
        )

    def _alike(self, allowed: NDArray[np.bool_]) -> Priced:
        """The best of the plans that treat all requests alike."""
        needed, entry_s = self._needed.sum(axis=0), self._entry_s.sum(axis=0)
        rows = self._rows.sum(axis=0)
        number = np.maximum(needed, 1.0)
        draft_s = entry_s.copy()
        for drafter in self._drafters:
            mine = self._drafter == drafter
            call = DraftCall(number[mine], self._level[mine], number[mine] * self._level[mine])
            draft_s[mine] += np.minimum(needed[mine], 1.0) * self._draft_costs[drafter](call)
        for lookup in self._lookups:
            draft_s[self._lookup == lookup] += self._draft_costs[lookup](
                DraftCall(self.number, 1, self.number)
            )
        in_pass = self.number + self._num_prompt_rows + rows
        step_s = self._step_cost.step_s(self.number, in_pass, self._drafted.sum(axis=0), rows)
        rate = (self.number + self._tokens.sum(axis=0)) / np.maximum(step_s - self._prompts_s + draft_s, 1e-9)
        place = int(np.where(allowed, rate, -1.0).argmax())
        draft = place % self._num_drafts
        places = np.where(self._used[:, place] > 0, place, draft)
        return self.price(np.where(self._needed[:, place] > 0, places, places - draft))

    def drafts(self, plan: Priced) -> bool:
        """Whether drafters, not lookups alone, draft for someone."""
        return any(self.options[place].drafter != NO_DRAFTER for place in plan.places.tolist())

    def nothing(self) -> Priced:
        """Return the choice without drafts."""
        return self.price(np.zeros(self.number, dtype=np.int64))

    # --- plans ------------------------------------------------------------------------------------------------

    def best(self, *, with_drafters: bool = True) -> Priced:
        """The best plan that is found; without drafters of lookups alone."""
        allowed = np.ones(len(self.options), dtype=bool) if with_drafters else self._drafter == NO_DRAFTER
        best = max(self.nothing(), self._alike(allowed), key=_rate)
        for _ in range(MAX_ROUNDS):
            shares = SHARING[:1] if self.number <= 2 or not with_drafters else SHARING
            better = max((self._each(best, share, allowed) for share in shares), key=_rate)
            if better.tokens_per_s <= best.tokens_per_s * WORTH_ANOTHER_ROUND:
                return max(better, best, key=_rate)
            best = better
        return best

    def _each(self, going: Priced, share: float, allowed: NDArray[np.bool_]) -> Priced:
        """Each request takes what is best for it at the going rate."""
        score = self._tokens - going.tokens_per_s * self._marginal_s(going, share)
        return self.price(np.where(allowed, score, -np.inf).argmax(axis=1))

    def _marginal_s(self, going: Priced, share: float) -> Floats:
        """Seconds that each option of each row takes next to a plan. Calls are shared by as many as in the plan, and by
        `share` of the requests at least."""
        every = np.arange(self.number)
        rows, drafted = (
            float(self._rows[every, going.places].sum()),
            float(self._drafted[every, going.places].sum()),
        )
        base, more = self.number + self._num_prompt_rows + rows, max(1.0, 0.25 * self.number)
        step_s = self._step_cost.step_s
        before = step_s(self.number, base, drafted, rows)
        row_s = (step_s(self.number, base + more, drafted, rows + more) - before) / more
        drafted_s = (
            step_s(self.number, base, self.number, rows) - step_s(self.number, base, 0.0, rows)
        ) / self.number
        call_s = np.zeros(len(self.options))
        for drafter in self._drafters:
            mine = self._drafter == drafter
            sharing = max(float((self._drafter[going.places] == drafter).sum()), share * self.number, 1.0)
            call = DraftCall(sharing, self._level[mine], sharing * self._level[mine])
            call_s[mine] = self._draft_costs[drafter](call) / sharing
        ask_s = np.zeros(len(self.options))
        for lookup in self._lookups:
            ask_s[self._lookup == lookup] = (
                self._draft_costs[lookup](DraftCall(self.number, 1, self.number)) / self.number
            )
        marginal = self._rows * row_s + self._drafted * drafted_s + self._needed * call_s + ask_s
        return np.asarray(marginal + self._entry_s)

    def extra_s(self, going: Priced, row: int, choice: Choice) -> float:
        """What it costs, beyond its yield, to give one row another option than a plan does."""
        places = going.places.copy()
        places[row] = self._places[choice]
        other = self.price(places)
        return max(0.0, other.step_s - other.tokens_per_s * other.step_s / going.tokens_per_s)

    def offers(self, row: int, choice: Choice) -> bool:
        """Whether a row may have it."""
        place = self._places.get(choice)
        return place is not None and self._needed[row, place] > 0

    def place_of(self, choice: Choice) -> int:
        """The option nearest to a choice that was made before: no deeper, and without what is no option any more."""
        depth = min(choice.depth, self._depths.get(choice.drafter, 0))
        draft = (choice.drafter, depth) if depth else (NO_DRAFTER, 0)
        nearest = Choice(*draft, choice.lookup, choice.min_tokens)
        return self._places.get(nearest) or self._places[Choice(*draft)]

    def tokens(self, plan: Priced) -> list[float]:
        """Return, by row, the tokens that a step is expected to yield."""
        gained: list[float] = (1.0 + self._tokens[np.arange(self.number), plan.places]).tolist()
        return gained


def _rate(plan: Priced) -> float:
    return plan.tokens_per_s
