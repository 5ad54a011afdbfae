"""Updates on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.engine.outputs import Update

Item = Update | Exception
"""What a caller is given; an exception is the last one."""
Put = Callable[[Item], None]
"""Called in the event loop."""


class Mailbox:
    """The mailbox of one event loop, which it wakes as seldom as possible.

    Every wake-up hands the interpreter's lock to the loop and delays the engine's next step. What is posted within
    `interval_s` of a delivery waits for the next one, which joins the updates of one answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._posted: list[tuple[Put, Item]] = []
        self._will_deliver = self._has_closed = False
        self._timer: asyncio.TimerHandle | None = None
        """Belongs to the loop."""

    @property
    def num_posted(self) -> int:
        """Items that wait to be delivered."""
        return len(self._posted)

    def post(self, items: Seq[tuple[Put, Item]], urgent: bool) -> None:
        """Called in the engine's thread; what is `urgent` is delivered at once, with all that waits."""
        with self._lock:
            if self._has_closed:
                return
            self._posted += items
            if self._will_deliver and not urgent:
                return
            self._will_deliver = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop has closed
            self._has_closed = True
            self._posted.clear()

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
            if not posted and self._timer is not None:
                return  # the timer delivers what comes next
            again = self._will_deliver = bool(posted) and self._interval_s > 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if again:
            self._timer = self._loop.call_later(self._interval_s, self._on_timer)
        for put, item in joined(posted) if self._interval_s > 0 else posted:
            put(item)

    def _on_timer(self) -> None:
        self._timer = None
        self._deliver()


def joined(items: Seq[tuple[Put, Item]]) -> list[tuple[Put, Item]]:
    """One update for each answer of each caller, at the place of its last one: a request's last update stays last."""
    found: dict[tuple[Put, str | None, int], tuple[Put, Item]] = {}
    for number, (put, item) in enumerate(items):
        if isinstance(item, Exception):
            found[put, None, number] = put, item
            continue
        key = put, item.request_id, item.index
        _, before = found.pop(key, (put, None))
        found[key] = put, before.joined(item) if isinstance(before, Update) else item
    return list(found.values())
