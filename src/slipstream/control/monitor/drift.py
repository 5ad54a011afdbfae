"""Watches one figure over requests: learns its reference level, detects a shift, adopts a lasting new level."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slipstream.stats.shift import Reference, ShiftTest, Value, mean

REFERENCE_SIZES = (100, 200, 400)
"""Numbers of requests after which the reference is estimated, and estimated again while there is no evidence of a
shift: more requests give a smaller tolerance."""
RESOLVE_REQUESTS = 500
"""After this many requests at a new level, that level becomes the reference."""

_CALM = 3.0
"""The reference is re-estimated only while the evidence of a shift is below this."""
_BLOCK = 50
"""Requests over which the mean is taken to tell whether it is back."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A mean that has moved."""

    before: float
    """The reference."""
    after: float
    """The mean since."""
    num_requests: int
    """Estimated number of requests since the mean moved; at most as many as are stored."""


class ShiftWatch:
    """Learns a reference, watches for a shift from it, and reports the shift while it lasts. Memory is bounded.

    A shift ends when the mean is nearer to the reference again than to the new level, when an operator acknowledges it
    (`resolve`), or when it has lasted for `RESOLVE_REQUESTS`. In the last two cases the new level becomes the
    reference. Otherwise the reference does not move, so that a slow drift is detected as well as a jump.
    """

    def __init__(self, *, rises: bool = True, falls: bool = True) -> None:
        self._rises, self._falls = rises, falls
        self._learning: list[Value] = []
        self._recent: deque[Value] = deque(maxlen=REFERENCE_SIZES[-1])
        self._test: ShiftTest | None = None
        self._size = 0
        """Number of requests behind the reference."""
        self._num_since = 0
        """Requests since the shift was detected."""
        self.shift: Shift | None = None
        """The current shift; None without one."""

    @property
    def reference(self) -> Reference | None:
        """The reference; None while it is being learned."""
        return self._test.reference if self._test else None

    @property
    def evidence(self) -> float:
        """Evidence of a shift, as `ShiftTest.evidence`; 0 while the reference is being learned."""
        return self._test.evidence if self._test else 0.0

    @property
    def level(self) -> float | None:
        """Mean of the last few requests; None without any."""
        return mean(list(self._recent)[-_BLOCK:]) if self._recent else None

    @property
    def num_learned(self) -> int:
        """Number of requests behind the reference, or collected for the first one."""
        return self._size or len(self._learning)

    @property
    def num_kept(self) -> int:
        """Requests in memory: the latest ones, and those from which a reference is being learned."""
        return len(self._recent) + len(self._learning)

    def add(self, item: Value) -> None:
        """Count a request."""
        self._recent.append(item)
        if self.shift is None:
            self._watch(item)
        else:
            self._wait()

    def resolve(self) -> None:
        """Make the level since the shift the reference."""
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
        """Estimate the reference (again) once there are enough requests and no evidence of a shift."""
        sizes = [size for size in REFERENCE_SIZES if self._size < size <= len(self._learning)]
        if sizes and self.evidence < _CALM:
            self._size = sizes[-1]
            reference = Reference.of(self._learning)
            self._test = ShiftTest(reference, rises=self._rises, falls=self._falls)
            if self._size == REFERENCE_SIZES[-1]:
                self._learning = []

    def _wait(self) -> None:
        """Count a request during a shift; end the shift if the mean is back, or has stayed long enough."""
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
        if self._num_since >= RESOLVE_REQUESTS:
            self.resolve()

    def _begin(self, values: list[Value]) -> None:
        """Start again, with `values` as the first requests."""
        self.shift = None
        self._test = None
        self._size = 0
        self._learning = values[-REFERENCE_SIZES[-1] :]
        self._improve()
