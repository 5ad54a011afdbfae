"""A thread in which code that is not trusted to return is called."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_Calls = queue.SimpleQueue[Callable[[], Any] | None]
_Results = queue.SimpleQueue[tuple[Any, Exception | None]]


class CallTimeout(Exception):
    """A call took longer than it may; not a `TimeoutError`, which the code that was called may raise itself."""


class Worker:
    """Calls functions one after the other in a thread of its own, and does not wait for ever.

    A call takes some 0.05 ms more than it would in the caller's thread. Python cannot end a thread: one that does not
    return is left alone, and its worker is of no use while it `hangs`. The thread ends when its worker is closed or
    forgotten, after the call that it is in.
    """

    def __init__(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._results: _Results = queue.SimpleQueue()
        self._given_up = False
        arguments = self._calls, self._results  # not the worker itself, which could never be forgotten then
        threading.Thread(target=_serve, args=arguments, name="slipstream-drafter", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """What `function` returns or raises; raises `CallTimeout` when it takes longer than `timeout_s`.

        Not to be called while it `hangs`.
        """
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            self._given_up = True
            raise CallTimeout(f"no answer within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result

    @property
    def hangs(self) -> bool:
        """True while a call that took too long has not returned; what it then says is thrown away."""
        if self._given_up and not self._results.empty():
            self._results.get()
            self._given_up = False
        return self._given_up

    def close(self) -> None:
        """Let the thread end; nothing may be called any more. May be called again."""
        self._finalizer()


def _serve(calls: _Calls, results: _Results) -> None:
    while (function := calls.get()) is not None:
        try:
            results.put((function(), None))
        except Exception as error:
            results.put((None, error))
        del function  # whatever it holds is nobody's business until the next call
