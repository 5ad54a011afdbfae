"""How long an engine's steps take, those around a swap of versions apart."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from slipstream.draft.combine.versions import VersionsDrafter
from slipstream.engine.engine import Engine

NEAR = 4
"""Steps after a swap that still belong to it: requests whose version was taken away are computed anew in them."""
MAX_STEPS = 2**17
"""Latest steps apart from swaps that are kept. The memory is taken at once, since memory is measured too."""
MAX_SWAPS = 4096
BAR = 1.0
"""Typical steps by which a swap may delay a request."""


@dataclass(slots=True)
class _Swap:
    """A version that is loaded, and enters or leaves."""

    change_s: float = 0.0
    """What was done between two steps."""
    loading_s: float = 0.0
    """The longest step while it was loaded; 0 without one."""
    after_s: float = 0.0
    """The longest step that followed, what was done before it included."""

    @property
    def longest_s(self) -> float:
        """Return the longest of all its steps."""
        return max(self.loading_s, self.after_s)


class StepTimes:
    """Told by one thread of steps and changes, by another one of what is loaded beside them."""

    def __init__(self) -> None:
        self._steps = np.full(MAX_STEPS, np.nan)
        self._num_steps = 0
        self._swaps: deque[_Swap] = deque(maxlen=MAX_SWAPS)
        self._num_loading = 0
        self._num_left = 0
        """Steps that still belong to the latest swap."""
        self._changed_s = 0.0
        """Since the last step."""
        self._lock = threading.Lock()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A version is loaded beside the steps, which takes time from them too."""
        with self._lock:
            self._begin()
            self._num_loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_loading -= 1
                self._num_left = NEAR

    def changed(self, taken_s: float) -> None:
        """Versions came or went between two steps, while requests were under way."""
        with self._lock:
            self._begin()
            self._num_left = NEAR
            self._changed_s += taken_s
            self._swaps[-1].change_s += taken_s

    def stepped(self, taken_s: float) -> None:
        """A step ended."""
        with self._lock:
            taken_s += self._changed_s
            self._changed_s = 0.0
            if self._num_left:
                self._swaps[-1].after_s = max(self._swaps[-1].after_s, taken_s)
                self._num_left -= 1
            elif self._num_loading:
                self._swaps[-1].loading_s = max(self._swaps[-1].loading_s, taken_s)
            else:
                self._steps[self._num_steps % MAX_STEPS] = taken_s
                self._num_steps += 1

    def status(self) -> dict[str, Any]:
        """Plain values; without steps or swaps only how many there were."""
        with self._lock:
            steps = self._steps[: min(self._num_steps, MAX_STEPS)].copy()
            swaps = [
                (one.change_s, one.loading_s, one.after_s, one.longest_s)
                for one in self._swaps
                if one.longest_s
            ]
        found: dict[str, Any] = {"steps": self._num_steps, "swaps": len(swaps), "bar": BAR, "near": NEAR}
        if len(steps) < NEAR or not swaps:
            return found
        changes, loading, after, longest = np.array(swaps).T * 1e3
        typical, limit = float(np.median(steps)) * 1e3, (1 + BAR) * float(np.median(steps)) * 1e3
        in_a_row = np.lib.stride_tricks.sliding_window_view(steps * 1e3, NEAR).max(axis=1)
        figures = {
            "typical_ms": typical,
            "p99_ms": float(np.quantile(steps, 0.99)) * 1e3,
            "longest_ms": float(steps.max()) * 1e3,
            "longest_change_ms": float(changes.max()),
            "median_at_swaps_ms": float(np.median(longest)),
            "longest_while_loading_ms": float(loading.max()),
            "longest_after_ms": float(after.max()),
            "longest_at_swaps_ms": float(longest.max()),
            "longest_delay_steps": float(longest.max()) / typical - 1,
        }
        return {
            **found,
            **{name: round(value, 3) for name, value in figures.items()},
            "swaps_over_bar": int((longest > limit).sum()),
            "share_over_bar": round(float((longest > limit).mean()), 4),
            "share_over_bar_elsewhere": round(float((in_a_row > limit).mean()), 4),
        }

    def _begin(self) -> None:
        if not self._num_loading and not self._num_left:
            self._swaps.append(_Swap())


@contextmanager
def watched(engine: Engine) -> Iterator[StepTimes]:
    """Times of an engine that has the drafter `versions`, for as long as the context is open."""
    times, drafter = StepTimes(), engine.drafter_as(VersionsDrafter)
    step, change, prepare = engine.step, drafter.change, drafter.prepare

    def timed_step() -> Any:
        return _timed(step, times.stepped)

    def timed_change(*args: Any, **named: Any) -> Any:
        if not engine.has_unfinished:  # nobody waits
            return change(*args, **named)
        return _timed(lambda: change(*args, **named), times.changed)

    def timed_prepare(*args: Any, **named: Any) -> Any:
        with times.loading():
            return prepare(*args, **named)

    with (
        mock.patch.object(engine, "step", timed_step),
        mock.patch.object(drafter, "change", timed_change),
        mock.patch.object(drafter, "prepare", timed_prepare),
    ):
        yield times


def _timed(call: Callable[[], Any], tell: Callable[[float], None]) -> Any:
    began_s = time.perf_counter()
    result = call()
    tell(time.perf_counter() - began_s)
    return result
