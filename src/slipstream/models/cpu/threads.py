"""How many threads arithmetic may use, in any thread and whatever another engine's step is doing.

PyTorch counts for each thread separately, and a thread that is new takes the count that was set last, by anybody. So
nothing here sets it for good: `limit` and `operators` set it for their body and put it back. A thread that begins
meanwhile would keep the count of such a body; `available` sees through that.

PyTorch begins with a thread a core, whatever share of them a container may use. Where no number was given, `available`
answers no more than the quota of the control group has use for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from slipstream.models.cpu.quota import cpu_quota, threads_in

_lock = threading.Lock()
_lowered_from: int | None = None
"""What PyTorch used before a body lowered the count last; None before the first time."""
_here = threading.local()
"""`available`: what `available` answers in the body that this thread is in."""
UNASKED = None if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys() else torch.get_num_threads()
"""PyTorch's count where none was given; None where the environment did."""


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> float:
    """How many cores' time this process may use, a control group's quota included."""
    quota = cpu_quota()
    return num_cores() if quota is None else min(num_cores(), quota)


def leaves_a_core(number: int | None) -> bool:
    """Whether an engine of `number` threads, None for all that are available, and another thread for everything
    else leave a core of those that this process may use."""
    engines = available() if number is None else number
    return usable_cores() - engines - 1 >= 1


def available() -> int:
    """How many threads a pass may use that is computed by the calling thread.

    That is PyTorch's count, unless this thread may have taken over the one of another engine's step: a thread other
    than the main one that is to use a single thread sets `num_threads`. A count that was not given is no
    larger than the quota of the control group has use for.
    """
    here: int | None = getattr(_here, "available", None)
    if here is not None:
        return here
    own = _of_process()
    quota = cpu_quota()
    return own if quota is None or own != UNASKED else min(own, threads_in(quota))


def _of_process() -> int:
    """PyTorch's count outside any body of this thread."""
    own = torch.get_num_threads()
    if own > 1 or _lowered_from is None or threading.current_thread() is threading.main_thread():
        return own
    return _lowered_from


@contextlib.contextmanager
def limit(number: int | None) -> Iterator[int]:
    """Let this thread use `number` threads within the body, None all that are available; yields how many.

    Models that are loaded in the body keep this number for their passes.
    """
    number = available() if number is None else number
    with _counting(number, number):
        yield number


@contextlib.contextmanager
def operators(number: int) -> Iterator[None]:
    """Let PyTorch's operators use `number` threads within the body; `available` stays as it is.

    One, where the kernels compute. After each parallel operator its other threads wait awake for the next one, for a
    millisecond or more, on the very cores that the kernels' threads then want; and the operators between passes are too
    small to share out.
    """
    if torch.get_num_threads() == number:
        yield
        return
    with _counting(number, available()):
        yield


@contextlib.contextmanager
def _counting(number: int, within: int) -> Iterator[None]:
    """PyTorch's operators use `number` threads within the body, and `within` are available."""
    global _lowered_from
    outer = getattr(_here, "available", None)
    outside = _of_process() if outer is None else outer
    # Outside any body this thread may have another body's count, which is not to be put back.
    before = outside if outer is None else torch.get_num_threads()
    with _lock:
        if number < before:
            _lowered_from = outside
        torch.set_num_threads(number)
    _here.available = within
    try:
        yield
    finally:
        _here.available = outer
        with _lock:
            torch.set_num_threads(before)
