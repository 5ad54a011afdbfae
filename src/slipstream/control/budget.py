"""The time that may be spent on finding out."""

from __future__ import annotations

from slipstream.control.step_cost import Mean

FIRST_TRIES = 3.0
"""Passes' worth of credit to begin with, since nothing is known."""
MAX_CREDIT_STEPS = 32
"""Steps' worth of credit that can be saved up."""


class Budget:
    """A fixed share of the time: half of it for tries, half for probes, estimated beforehand and paid at once.

    Regret is bounded by it, whatever the traffic.
    """

    def __init__(self, share: float, pass_s: float, step_s: Mean) -> None:
        """`pass_s` is what a target pass should take; `step_s` learns what steps do."""
        self.share = share
        self.total_s = self.spent_s = 0.0
        self._step_s = step_s
        self._credit_s = {"probe": 0.0, "try": FIRST_TRIES * pass_s if share else 0.0}

    @property
    def most_s(self) -> float:
        """What can be saved up for one thing."""
        return MAX_CREDIT_STEPS * self._step_s.value

    def has_any(self, what: str) -> bool:
        """False where nothing can be paid for, whatever it costs."""
        return self._credit_s[what] > 0

    def can_pay(self, what: str, price_s: float) -> bool:
        return self._credit_s[what] >= price_s

    def pay(self, what: str, price_s: float) -> None:
        self._credit_s[what] -= price_s
        self.spent_s += price_s

    def earn(self, seconds: float, drafted: bool) -> None:
        """A share of what steps took; without drafts there is nothing to probe."""
        self.total_s += seconds
        for_tries = 0.5 if drafted else 1.0
        for what, part in ("probe", 1 - for_tries), ("try", for_tries):
            credit_s = self._credit_s[what]
            self._credit_s[what] = min(credit_s + part * self.share * seconds, max(credit_s, self.most_s))
