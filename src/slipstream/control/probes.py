"""A few steps done the other way: without drafts where there are some, with drafts where there are none."""

from __future__ import annotations

from slipstream.control.budget import Budget
from slipstream.control.realised import NUM_BACK_STEPS, NUM_OFF_STEPS, NUM_ON_STEPS, Pair, Realised, Step
from slipstream.control.step_cost import Mean

USUAL_GAIN = 1.5
"""Of drafts, before anything is estimated."""
LEAST_LOSS = 0.02
"""Of a step in a probe: what is done otherwise is never free."""


class Probes:
    """When a probe begins, how long it goes on, and what it costs."""

    def __init__(self, budget: Budget, step_s: Mean) -> None:
        """`step_s` is what steps take."""
        self.realised = Realised()
        self.in_this_step = False
        self.with_drafts = False
        """The probe at hand, or the last one, has drafts: there were none before it."""
        self.num_requests = 0
        """Of the probe at hand, or of the last one."""
        self._budget = budget
        self._step_s = step_s
        self._left = 0
        self._lost_s: list[tuple[float, float]] = []
        """Of the probe's steps, seconds and the tokens that a sequence gained."""
        self._paid_s = 0.0
        self._watched = float(NUM_ON_STEPS)
        """Steps that may be told of one after the other, because a probe can be paid for and is compared with them."""

    @property
    def rests(self) -> bool:
        """Nobody is drafted for in this step, to see what is gained."""
        return self.in_this_step and not self.with_drafts

    def price_s(self, gain: float | None, lost: float | None, books_s: float) -> float:
        """Seconds that a probe costs by estimate. `gain` is what drafts are believed to gain; `lost`, where there are
        none, what a step with some costs beyond its yield, in steps."""
        step_s = self._step_s.value  # not less than without drafts, and known without a calculation
        if lost is None:
            return NUM_OFF_STEPS * (step_s * max(LEAST_LOSS, 1 - 1 / (gain or USUAL_GAIN)) + books_s)
        price_s = NUM_BACK_STEPS * (step_s * max(LEAST_LOSS, lost) + books_s)
        return min(
            price_s, self._budget.most_s
        )  # what costs more than can be saved up is paid off afterwards

    def can_begin(self, num_requests: int, with_drafts: bool, price_s: float) -> bool:
        """Whether the steps before are fit for a comparison that can be paid for."""
        if not self._budget.has_any("probe") or not self._budget.can_pay("probe", price_s):
            return False
        return self.realised.can_probe(num_requests, with_drafts)

    def choose(
        self, num_requests: int, num_other_rows: int, with_drafts: bool, price_s: float | None
    ) -> bool:
        """Before a step: whether it is one of a probe. None of `price_s`: none may begin."""
        if self._left and (num_other_rows or num_requests != self.num_requests):
            self.give_up()  # what runs now is not what it would be compared with
        may_begin = not self._left and not num_other_rows and price_s is not None
        if may_begin and price_s is not None and self.can_begin(num_requests, with_drafts, price_s):
            self._budget.pay("probe", price_s)
            self.with_drafts, self.num_requests, self._paid_s = with_drafts, num_requests, price_s
            self._left = NUM_BACK_STEPS if with_drafts else NUM_OFF_STEPS
        self.in_this_step = self._left > 0
        return self.in_this_step

    def give_up(self) -> None:
        """It cannot be finished."""
        self._left, self.in_this_step = 0, False
        self._lost_s = []
        self.realised.give_up()

    def learn(self, step: Step) -> Pair | None:
        """A step that only decoded; the pair, where it ended a probe."""
        pair = self.realised.learn(step, self.in_this_step, self.with_drafts)
        self._left -= self.in_this_step
        if self.in_this_step:
            tokens = sum(gain.num_tokens for gain in step.gains) / len(step.gains)
            self._lost_s.append((step.seconds, tokens))
            if not self._left:
                self._settle(pair)
        return pair

    def _settle(self, pair: Pair | None) -> None:
        """Pay what the probe cost beyond its price: drafts may gain more than was believed, and drafters that begin may
        have long texts to compute first."""
        if pair is not None:
            usual_s = (
                pair.off_s if self.with_drafts else pair.on_s / pair.on_tokens
            )  # a token, outside the probe
            spent_s = sum(seconds - tokens * usual_s for seconds, tokens in self._lost_s)
            self._budget.pay("probe", max(0.0, spent_s - self._paid_s))
        self._lost_s = []

    def watches(self, price_s: float) -> bool:
        """After a step: whether the next one is to be told of, so that a probe has something to be compared with."""
        if self._budget.has_any("probe") and self._budget.can_pay("probe", price_s) and self._watched >= 1:
            self._watched -= 1
            return True
        self._watched = min(self._watched + 0.1, float(NUM_ON_STEPS))
        return False
