"""Work in this process while an engine steps: it takes what the steps leave of cores and of the interpreter."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from slipstream.models.cpu import threads

T = TypeVar("T")

SWITCH_S = 0.0002
"""How long a thread keeps the interpreter while another one waits for it. By default that is 5 ms, and a step waits as
often as it comes back from a kernel."""
_NICENESS = 10
"""Enough to make way for the kernels' threads. A thread of the lowest priority might keep the interpreter from the step
where other processes want all cores."""
_interval = threading.Lock()
_num_short = 0
_usual_s = 0.0


def run_concurrently(work: Callable[[], T], num_threads: int | None) -> T:
    """What `work` returns or raises, called in a thread of its own that makes way for others; waits for it.

    Models that are loaded in it compute with `num_threads` later, None for all that are available.
    """
    done: Future[T] = Future()

    def run() -> None:
        if sys.platform == "linux":  # elsewhere threads have no priorities of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            with threads.limit(num_threads), threads.operators(1), _short_switches():
                done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="learn-load", daemon=True)
    thread.start()
    thread.join()
    return done.result()


@contextlib.contextmanager
def _short_switches() -> Iterator[None]:
    """Threads hand over the interpreter soon; afterwards as before, once the last of such bodies has ended."""
    global _num_short, _usual_s
    with _interval:
        if not _num_short:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_s, SWITCH_S))
        _num_short += 1
    try:
        yield
    finally:
        with _interval:
            _num_short -= 1
            if not _num_short:
                sys.setswitchinterval(_usual_s)
