"""A fixed share of the time, out of which trials and probes are paid: what is not chosen is not forgotten."""

from __future__ import annotations

from slipstream.control.cost import Mean

MAX_CREDIT_STEPS = 32
"""Steps' worth of credit that can be saved up."""


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
        """As `pay`, for something in addition to what is wanted of this kind."""
        self.credit_s -= price_s
        self._spent_s[kind] += price_s

    def earn(self, seconds: float) -> None:
        """A share of what a step took."""
        self.total_s += seconds
        self.credit_s = min(self.credit_s + self.share * seconds, max(self.credit_s, self.max_credit_s))
