"""How much memory a compiled grammar takes while answers follow it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import psutil

T = TypeVar("T")

MAX_GROWTH_BYTES = 64 * 2**20
"""What a form may add while answers follow it; the largest schemas that were tried add 2 MiB."""
MAX_COUNTED_BYTES = 16 * 2**20
"""No call of llguidance within its limits adds more: what does is another thread's."""
SLOW_S = 0.001
"""A call of llguidance that computes for longer may have built much."""
BYTES_PER_S = 512 * 2**20
"""No call of llguidance builds faster: what a call adds beyond that is another thread's."""


class Footprint:
    """What one compiled grammar takes: once compiled, and since then. All its answers share it.

    llguidance builds the states of its lexer when a text first gets there. Whatever the grammar, a call builds no more
    than some MiB, but a hostile one may do so at every token.

    Only what the whole process has held can be read, so other threads are in it. No more is counted than the call could
    have built in the time for which it computed.
    """

    def __init__(self, num_bytes: int = 0, on_exceeded: Callable[[], None] = lambda: None) -> None:
        """`num_bytes` is what it took to compile; `on_exceeded` is called once it has grown by more than
        `MAX_GROWTH_BYTES`."""
        self.num_bytes = num_bytes
        self._grown = 0
        self._measures = False
        self._on_exceeded = on_exceeded

    @property
    def exceeded(self) -> bool:
        """True once answers must follow the form no further."""
        return self._grown > MAX_GROWTH_BYTES

    def during(self, work: Callable[[], T], clock: Callable[[], float]) -> T:
        """The result of `work`, with what it adds. To measure costs some microseconds: it begins with the first slow
        call. What fits into memory that the process has held before is not counted.

        `clock` counts the seconds for which this thread computes; while it waits, only others build.
        """
        before = peak_bytes() if self._measures else 0
        started_s = clock()
        result = work()
        took_s = clock() - started_s
        if took_s > SLOW_S:
            if self._measures:
                self._add(peak_bytes() - before, min(int(took_s * BYTES_PER_S), MAX_COUNTED_BYTES))
            self._measures = True
        return result

    def _add(self, num_bytes: int, most: int) -> None:
        was_within = not self.exceeded
        self._grown += min(num_bytes, most)
        if was_within and self.exceeded:
            self._on_exceeded()


def peak_bytes() -> int:
    """The most memory that the process has ever held. Asking takes no longer in a process that has much."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def heap_bytes() -> int:
    """What the process has allocated, or the most that it has held where the C library does not say.

    The C library walks through all that is free: tens of milliseconds in a large process, so it is asked about a whole
    compilation and never in a step.
    """
    info = _mallinfo()
    if info is None:
        return peak_bytes()
    now = info()
    return int(now.uordblks + now.hblkhd)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    """glibc's, where that is the C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    return function
