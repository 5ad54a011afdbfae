"""What is not chosen is not forgotten: now and then a request tries it for a few steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slipstream.control.budget import Budget
from slipstream.control.choice import Asked
from slipstream.control.knowledge import Knowledge
from slipstream.control.plan import Market, Plan
from slipstream.draft.choice import Choice

TRY_STEPS = 3
"""Steps of a try, each of one level: the first token says the most for its price."""
NEVER = -1000
"""The turn of a try that has not been."""


@dataclass(slots=True)
class _Try:
    sequence_id: int
    choice: Choice
    steps_left: int = TRY_STEPS


class Tries:
    """One request at a time tries what the plan does not give it."""

    def __init__(self, known: Knowledge, budget: Budget) -> None:
        self.in_this_step: int | None = None
        """The request that tries something in this step, if one does."""
        self._known = known
        self._budget = budget
        self._try: _Try | None = None
        self._last: dict[tuple[int, int], int] = {}
        """Sequence and member to the turn of their last try."""

    @property
    def under_way(self) -> bool:
        return self._try is not None

    def consider(
        self,
        market: Market,
        plan: Plan,
        asked: Seq[Asked],
        books_s: float,
        choice_of: Callable[[int], Choice],
    ) -> None:
        """Have the request of which least is known try what the plan does not give it, when there is credit for it.

        `books_s` is what telling of a step takes, `choice_of` a member asked for one level.
        """
        if self._try is not None or not self._budget.has_any("try") or plan.tokens_per_s <= 0:
            return
        found = self._least_known(market, plan, asked)
        if found is None:
            return
        i, number = found
        members, depths = plan.members.copy(), plan.depths.copy()
        members[i], depths[i] = number, 1
        tried = market.price(members, depths)
        tokens = tried.tokens_per_s * tried.step_s
        price_s = TRY_STEPS * (max(0.0, tried.step_s - tokens / plan.tokens_per_s) + books_s)
        price_s += self._known.entry_s(number, asked[i])
        # What costs more than can be saved up is tried too, and paid off afterwards: it may be cheaper than believed.
        if self._budget.can_pay("try", min(price_s, self._budget.most_s)):
            self._budget.pay("try", price_s)
            self._last[asked[i].sequence_id, number] = self._known.turn
            self._try = _Try(asked[i].sequence_id, choice_of(number))

    def _least_known(self, market: Market, plan: Plan, asked: Seq[Asked]) -> tuple[int, int] | None:
        """A request, by its place, and a member that it is not given."""
        best: tuple[float, int, int] | None = None
        for i, request in enumerate(asked):
            for number in range(len(self._known.members)):
                if plan.members[i] == number or not np.isfinite(market.offers[number].tokens[i, 1]):
                    continue
                mine, of_task, _ = self._known.acceptance[number].num_drafts(
                    request.sequence_id, request.task
                )
                since = self._known.turn - self._last.get((request.sequence_id, number), NEVER)
                score = since / (1.0 + mine + 0.1 * of_task)
                if best is None or score > best[0]:
                    best = score, i, number
        return None if best is None else best[1:]

    def choice(self, asked: Seq[Asked]) -> tuple[int, Choice] | None:
        """In a step while a try is under way: the place of its request, and what it tries; None where it has gone."""
        trial = self._try
        if trial is None:
            return None
        trial.steps_left -= 1
        place = next((i for i, each in enumerate(asked) if each.sequence_id == trial.sequence_id), None)
        if place is None or not trial.steps_left:
            self._try = None
        if place is None:
            return None
        self.in_this_step = trial.sequence_id
        return place, trial.choice

    def release(self, sequence_id: int) -> None:
        """The request is over."""
        for number in range(len(self._known.members)):
            self._last.pop((sequence_id, number), None)
