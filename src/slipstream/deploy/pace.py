"""How fast requests come through, for estimates of waiting times."""

from __future__ import annotations

import math

HALF_LIFE = 64
"""Requests after which a measurement counts half."""
MAX_RETRY_AFTER_S = 60


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Count a value."""
        share = 1 - 0.5 ** (1 / HALF_LIFE)
        self.value = value if self.value is None else self.value + share * (value - self.value)


class Pace:
    """Times between finished answers while some wait, to the first token, and between tokens. Seconds."""

    def __init__(self) -> None:
        self._interval_s = RunningMean()
        self._first_s = RunningMean()
        self._token_s = RunningMean()
        self._finished_s: float | None = None

    def finished(self, num_answers: int, now_s: float, some_wait: bool) -> None:
        """Answers have ended; only between two such moments with a full house is the pace the replicas'."""
        if some_wait and self._finished_s is not None:
            self._interval_s.add((now_s - self._finished_s) / num_answers)
        self._finished_s = now_s if some_wait else None

    def first_token(self, seconds: float) -> None:
        """From a replica's being given a request to its first token."""
        self._first_s.add(seconds)

    def tokens(self, seconds: float, num: int) -> None:
        """An answer's later tokens took so long."""
        self._token_s.add(seconds / num)

    def wait_s(self, num_answers: int) -> float:
        """How long until so many answers have ended; 0 where nothing is known."""
        return num_answers * (self._interval_s.value or 0.0)

    def needs_s(self, num_tokens: int) -> float:
        """How long an answer of so many tokens takes once it runs; 0 where nothing is known."""
        return (self._first_s.value or 0.0) + (num_tokens - 1) * (self._token_s.value or 0.0)

    def retry_after_s(self, num_answers: int) -> int:
        """For `Retry-After`: when so many answers will have ended, within bounds."""
        return min(max(1, math.ceil(self.wait_s(num_answers))), MAX_RETRY_AFTER_S)
