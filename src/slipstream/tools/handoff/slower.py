"""A sequential test of whether answers are slower with speculation than without, from paired probes."""

from __future__ import annotations

from slipstream.stats.shift import FALSE_ALARM_RATE, Bets, Value

CLEARING_EVIDENCE = 100.0
"""For the opposite, after which it is no longer said."""
_EVEN = 0.5


class SlowerTest:
    """Bets on which side of a pair is faster: a sign test that may be read after every pair.

    Where the side with speculation is faster in at least half of the pairs, the evidence reaches 1 / rate with
    probability at most the rate, however long one looks (`stats.shift`). It says nothing of by how much.
    """

    def __init__(self) -> None:
        self.is_slower = False
        self.num_pairs = 0
        """Up to the decision, or since it."""
        self.num_slower = 0
        """Pairs in which speculation was slower."""
        self._is_decided = False
        self._bets = self._new()

    def add(self, speedup: float) -> None:
        """Count a pair: tokens a second with speculation over those without."""
        if self._is_decided:
            self.num_pairs, self.num_slower, self._is_decided = 0, 0, False
        self.num_pairs += 1
        self.num_slower += speedup < 1
        self._bets.add(Value(1.0 if speedup > 1 else 0.0 if speedup < 1 else _EVEN))
        if self._bets.evidence >= (CLEARING_EVIDENCE if self.is_slower else 1 / FALSE_ALARM_RATE):
            self.is_slower, self._is_decided = not self.is_slower, True
            self._bets = self._new()

    def begin(self) -> None:
        """Restart the test."""
        self.is_slower, self.num_pairs, self.num_slower, self._is_decided = False, 0, 0, False
        self._bets = self._new()

    def _new(self) -> Bets:
        return Bets(_EVEN, weight=1.0, variance=_EVEN**2, below=not self.is_slower)
