"""One figure of one kind of request over time: what is usual is learned, a shift is noticed, a new level accepted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slipstream.monitor.shift import Reference, ShiftTest, Value, mean

REFERENCE_SIZES = (100, 200, 400)
"""After so many requests the reference is learned, and learned again while nothing speaks for a shift: the more, the
less of a shift has to be put down to not knowing better."""
SETTLE_REQUESTS = 500
"""After so many requests at a new level, that level is the reference."""

_CALM = 3.0
"""Evidence under which the reference may still be improved."""
_BLOCK = 50
"""Requests that together tell whether the mean is back."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A mean that has moved."""

    before: float
    """The reference."""
    after: float
    """The mean since."""
    num_requests: int
    """Since the mean moved, by estimate; at most as many as are remembered."""


class ShiftWatch:
    """Learns, watches, and says while a shift lasts. Memory is bounded: some hundred numbers.

    A shift ends when the mean is nearer to the reference again than to the new level, when somebody has taken note
    (`settle`), or when the new level has lasted for `SETTLE_REQUESTS`. In the last two cases it becomes the reference.
    The reference is otherwise kept as it was: a mean that creeps away is noticed as well as one that jumps.
    """

    def __init__(self, *, rises: bool = True, falls: bool = True) -> None:
        self._rises, self._falls = rises, falls
        self._learning: list[Value] = []
        self._recent: deque[Value] = deque(maxlen=REFERENCE_SIZES[-1])
        self._test: ShiftTest | None = None
        self._size = 0
        """Of the requests behind the reference."""
        self._num_since = 0
        """Requests since the shift was noticed."""
        self.shift: Shift | None = None
        """While it lasts."""

    @property
    def reference(self) -> Reference | None:
        """What is usual; None while it is being learned."""
        return self._test.reference if self._test else None

    @property
    def evidence(self) -> float:
        """For a shift, as `ShiftTest` has it; 0 while the reference is being learned."""
        return self._test.evidence if self._test else 0.0

    @property
    def level(self) -> float | None:
        """The mean of the last few requests; None before there were any."""
        return mean(list(self._recent)[-_BLOCK:]) if self._recent else None

    @property
    def num_learned(self) -> int:
        """Requests seen of those that the first reference needs."""
        return self._size or len(self._learning)

    def add(self, item: Value) -> None:
        """Take in a request."""
        self._recent.append(item)
        if self.shift is None:
            self._watch(item)
        else:
            self._wait()

    def settle(self) -> None:
        """Take the level since the shift for the reference."""
        if self.shift is None:
            return
        values = list(self._recent)[-max(self.shift.num_requests + self._num_since, 1) :]
        self._begin(values)

    def _watch(self, item: Value) -> None:
        if self._size < REFERENCE_SIZES[-1]:
            self._learning.append(item)
        if self._test is not None and self._test.add(item):
            num = min(self._test.age, len(self._recent))
            after = mean(list(self._recent)[-num:])
            self.shift = Shift(self._test.reference.mean, after, num)
            self._num_since = 0
            self._learning = []
        else:
            self._improve()

    def _improve(self) -> None:
        """Learn the reference (again) where enough requests are there and nothing speaks for a shift."""
        sizes = [size for size in REFERENCE_SIZES if self._size < size <= len(self._learning)]
        if sizes and self.evidence < _CALM:
            self._size = sizes[-1]
            reference = Reference.of(self._learning)
            self._test = ShiftTest(reference, rises=self._rises, falls=self._falls)
            if self._size == REFERENCE_SIZES[-1]:
                self._learning = []

    def _wait(self) -> None:
        """After a shift: is the mean back, or has it stayed?"""
        assert self.shift is not None
        assert self._test is not None
        self._num_since += 1
        if self._num_since % _BLOCK == 0:
            level = mean(list(self._recent)[-_BLOCK:])
            if abs(level - self.shift.before) < abs(level - self.shift.after):
                reference = self._test.reference
                self._test = ShiftTest(reference, rises=self._rises, falls=self._falls)
                self.shift = None
                return
        if self._num_since >= SETTLE_REQUESTS:
            self.settle()

    def _begin(self, values: list[Value]) -> None:
        """Learn anew from `values`, and from what comes."""
        self.shift = None
        self._test = None
        self._size = 0
        self._learning = values[-REFERENCE_SIZES[-1] :]
        self._improve()
