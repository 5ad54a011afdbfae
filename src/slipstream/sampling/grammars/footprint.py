"""Estimates the memory that a compiled grammar takes, and its growth while answers use it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import psutil

T = TypeVar("T")

MAX_GROWTH_BYTES = 64 * 2**20
"""The most that a grammar may grow in use; the largest schemas that were tested grow by 2 MiB."""
MAX_COUNTED_BYTES = 16 * 2**20
"""Bound on the growth counted for one call: within its limits llguidance adds no more, the rest is other threads'."""
SLOW_S = 0.001
"""Calls of llguidance that take longer are measured, since they may have allocated much."""
BYTES_PER_S = 512 * 2**20
"""Bound on llguidance's rate of allocation; growth beyond it is attributed to other threads."""


class GrammarMemory:
    """Memory of one compiled grammar, which all its answers share: when compiled, and its growth since.

    llguidance builds the states of its lexer lazily. One call adds a few MiB at most, but a hostile grammar may do so
    at every token.

    Only the peak memory of the whole process can be read, which includes other threads. So the growth counted for a
    call is bounded by what it could have allocated in its computing time.
    """

    def __init__(self, num_bytes: int = 0, on_exceeded: Callable[[], None] = lambda: None) -> None:
        """`num_bytes` is its size when compiled; `on_exceeded` is called once it has grown by more than
        `MAX_GROWTH_BYTES`."""
        self.num_bytes = num_bytes
        self.grown_bytes = 0
        self._measures = False
        self._on_exceeded = on_exceeded

    @property
    def exceeded(self) -> bool:
        """True once the grammar has grown too large to be used further."""
        return self.grown_bytes > MAX_GROWTH_BYTES

    def during(self, work: Callable[[], T], clock: Callable[[], float]) -> T:
        """The result of `work`, whose growth is counted. Measuring takes some microseconds and begins with the first
        slow call. Growth below the process's earlier peak is not seen.

        `clock` returns this thread's CPU time in seconds.
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
        self.grown_bytes += min(num_bytes, most)
        if was_within and self.exceeded:
            self._on_exceeded()


def peak_bytes() -> int:
    """The peak resident memory of the process, in bytes; a constant-time call."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def heap_bytes() -> int:
    """Bytes allocated by the process now; the peak resident memory where the C library does not report them.

    The C library walks all free blocks, tens of milliseconds in a large process: call it around a compilation, never in
    a step.
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
    """glibc's `mallinfo2`; None with another C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    return function
