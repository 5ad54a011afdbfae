"""Probes: a few steps the other way for all requests, without drafts where there are some.

Compared with the steps just before, they show what speculation really gains.
"""

from __future__ import annotations

from slipstream.control.budget import Budget
from slipstream.control.cost import Mean
from slipstream.control.realised import NUM_BACK_STEPS, NUM_OFF_STEPS, Pair, Realised, Step, mean

USUAL_GAIN = 1.5
"""Gain of drafts that is assumed before anything is estimated."""
MIN_LOSS = 0.02
"""Loss of a step in a probe, at least: doing otherwise is never free."""


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

    @property
    def goes_on(self) -> bool:
        """Whether the next step is of the same probe, or of none as this one."""
        return self._left > 1 if self.is_active else not self._left

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
            self._made.append((step.seconds, mean(gained) if gained else 1.0))
            if not self._left:
                self._resolve(pair)
        return pair

    def _resolve(self, pair: Pair | None) -> None:
        """Pay what the probe cost beyond its price: drafts may gain more than was estimated, and drafters that begin
        may have long texts to compute first."""
        if pair is not None:
            usual_s = pair.off_s if self.with_drafts else pair.on_s / pair.on_tokens  # of a token, else
            cost_s = sum(seconds - tokens * usual_s for seconds, tokens in self._made)
            self._budget.pay("probe", max(0.0, cost_s - self._paid_s))
        self._made = []
