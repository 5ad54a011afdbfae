"""How many threads arithmetic may use, whoever asks and whatever another engine's step is doing.

PyTorch counts for each thread separately, and a thread that is new takes the count that was set last, by anybody. Steps
of the CPU kernels lower that count for their duration, so a thread that begins meanwhile would keep the lower one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_lowered_from: int | None = None
"""What PyTorch used outside `operators` when that lowered the count last; None before the first time."""
_here = threading.local()
"""`outside`: what this thread uses outside the `operators` that it is in."""


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available() -> int:
    """How many threads a pass may use that is computed by the calling thread.

    That is PyTorch's count, unless this thread may have taken over the one of another engine's step: a thread other
    than the main one that is to use a single thread asks for it by `num_threads`.
    """
    outside: int | None = getattr(_here, "outside", None)
    if outside is not None:
        return outside
    own = torch.get_num_threads()
    if own > 1 or _lowered_from is None or threading.current_thread() is threading.main_thread():
        return own
    return _lowered_from


def adopt(number: int | None) -> int:
    """Let PyTorch's operators use `number` threads in this thread, None the `available` ones; returns how many."""
    number = available() if number is None else number
    with _lock:
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)
    return number


@contextlib.contextmanager
def operators(number: int) -> Iterator[None]:
    """Let PyTorch's operators use `number` threads within the body.

    One, where the kernels compute. After each parallel operator its other threads wait awake for the next one, for a
    millisecond or more, on the very cores that the kernels' threads then want; and the operators between passes are too
    small to share out.
    """
    global _lowered_from
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    outside = available()
    with _lock:
        if number < before:
            _lowered_from = outside
        torch.set_num_threads(number)
    _here.outside = outside
    try:
        yield
    finally:
        _here.outside = None
        with _lock:
            torch.set_num_threads(outside)
