"""A thread in which code that is not trusted to return is called."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class CallTimeout(Exception):
    """A call took longer than it may; not a `TimeoutError`, which the code that was called may raise itself."""


class Worker:
    """Calls functions one after the other in a thread of its own, and does not wait for ever.

    A call takes some 0.05 ms more than it would in the caller's thread. Python cannot end a thread: one that does not
    return is left alone, and its worker is of no use any more.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="slipstream-drafter", daemon=True).start()

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """What `function` returns or raises; raises `CallTimeout` when it takes longer than `timeout_s`."""
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=timeout_s)
        except queue.Empty:
            raise CallTimeout(f"no answer within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result

    def _run(self) -> None:
        while True:
            function = self._calls.get()
            try:
                self._results.put((function(), None))
            except Exception as error:
                self._results.put((None, error))
            del function  # whatever it holds is nobody's business until the next call
