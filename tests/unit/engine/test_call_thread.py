"""The thread for code that is not trusted, and its end."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.draft.guarded.call_thread import CallThread, CallTimeout
from slipstream.draft.guarded.guard import MAX_FAILURES, Guard
from slipstream.testing.stub_drafters import OracleDrafter, OracleOptions, draft_context


class PluginDrafter(OracleDrafter):
    """Not Slipstream's own."""


class RaisingPlugin(PluginDrafter):
    def propose(self, sequences: Any, budgets: Any) -> Any:
        raise RuntimeError("no")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "slipstream-drafter"}


def ended(thread: threading.Thread) -> bool:
    thread.join(120)
    return not thread.is_alive()


def started(make: Callable[[], Any]) -> tuple[Any, threading.Thread]:
    """What `make` makes, and the one thread that it starts."""
    before = threads()
    made = make()
    [thread] = threads() - before
    return made, thread


def test_a_worker_answers_raises_and_waits_no_longer_than_it_may() -> None:
    worker = CallThread()
    assert worker.call(lambda: threading.current_thread().name, 120) == "slipstream-drafter"
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0, math.inf)
    go_on = threading.Event()
    with pytest.raises(CallTimeout, match=r"no answer within 0\.05 s"):
        worker.call(lambda: go_on.wait(120), 0.05)
    assert not go_on.is_set(), "the call has not ended"
    go_on.set()


def test_a_closed_worker_ends_its_thread() -> None:
    worker, thread = started(CallThread)
    worker.call(lambda: None, 120)
    assert thread.is_alive()
    worker.close()
    worker.close()
    assert ended(thread)


def test_a_forgotten_worker_ends_its_thread_after_the_call_that_it_is_in() -> None:
    worker, thread = started(CallThread)
    go_on = threading.Event()
    with pytest.raises(CallTimeout):
        worker.call(lambda: go_on.wait(120), 0.01)
    del worker
    gc.collect()
    assert thread.is_alive()
    go_on.set()
    assert ended(thread)


def test_a_drafter_that_is_retired_for_good_leaves_no_thread() -> None:
    drafter = RaisingPlugin(OracleOptions(), draft_context(9))
    guard, thread = started(lambda: Guard(drafter, 9, drafter.traits.kinds))
    for number in range(MAX_FAILURES):
        assert not guard.retired
        guard.propose([Sequence(number, str(number), 0, [1, 2], 1, SamplingParams(), 0)], [2])
    assert guard.retired
    assert ended(thread)
