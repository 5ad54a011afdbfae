"""When the learner runs: while no request runs, for a small share of the time concurrently with requests, never with
many.

A process of the lowest priority still slows a step down where the engine wants all cores: it shares caches and memory,
and gives its core up late. So it is stopped outright as a step begins, and goes on once there is nothing to do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

BESIDE_SHARE = 0.02
"""Share of the time that requests run in which the learner runs too by default: where something always runs,
it still learns."""
SLICE_S = 0.05
"""How long it runs at a time while requests run."""
IDLE_S = 0.02
"""Nothing has run for so long before the learner goes on: the next request often follows at once."""


class Pausable(Protocol):
    """A process that can be stopped at any instant."""

    def pause(self) -> None:
        """Stop it, if it is not."""
        ...

    def resume(self) -> None:
        """Let it go on, if it does not."""
        ...


class LearnerPace:
    """`step_begins` is called in the engine's thread, `look` by another one many times a second."""

    def __init__(
        self,
        learner: Pausable,
        has_own_core: bool,
        beside_share: float = BESIDE_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """While requests run it runs for `beside_share` of the time, or always where the engine leaves it a core."""
        self._learner, self._share_of_time, self._clock = learner, beside_share, clock
        self._has_own_core = has_own_core or beside_share >= 1
        self._lock = threading.Lock()
        self._may_run = self._has_own_core
        self._is_idle = True
        self._num_held = 0
        self._credit_s = 0.0
        self._looked_s = self._worked_s = clock()
        self._slice_ends_s = 0.0

    def step_begins(self) -> None:
        """Stop the learner, unless it may run during this step."""
        self._worked_s, self._is_idle = self._clock(), False
        if not self._may_run:
            self._pause()

    def look(self, num_running: int, num_waiting: int, max_running: int) -> None:
        """Decide by what runs and waits now."""
        now_s = self._clock()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        many = num_waiting > 0 or 2 * num_running > max_running
        if num_running + num_waiting == 0:
            self._may_run = self._has_own_core
            if now_s - self._worked_s >= IDLE_S:
                self._is_idle = True
                self._learner.resume()
            return
        self._worked_s = now_s  # a step may take long
        if many:
            self._may_run, self._credit_s = False, 0.0
            self._pause()
        elif self._has_own_core:
            self._may_run = True
            self._learner.resume()
        else:
            self._share(elapsed_s, now_s)

    def _share(self, elapsed_s: float, now_s: float) -> None:
        """Give it a slice of time once so much has gone by that a slice is its share."""
        if self._may_run:
            if now_s >= self._slice_ends_s:
                self._may_run = False
                self._pause()
            return
        self._credit_s += self._share_of_time * elapsed_s
        if self._credit_s >= SLICE_S:
            self._credit_s = 0.0
            self._slice_ends_s = now_s + SLICE_S
            self._may_run = True
            self._learner.resume()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It is not stopped within the body: it may hold a lock that the caller waits for."""
        with self._lock:
            self._num_held += 1
        self._learner.resume()
        try:
            yield
        finally:
            with self._lock:
                self._num_held -= 1
            if not (self._is_idle or self._may_run):
                self._pause()

    def _pause(self) -> None:
        with self._lock:
            if not self._num_held:
                self._learner.pause()
