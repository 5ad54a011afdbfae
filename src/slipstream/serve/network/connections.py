"""All connections of a server: their limit, which one is closed first, and the log of closed ones."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from pathlib import Path
from typing import Protocol

from slipstream.serve.config import ServeConfig
from slipstream.serve.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
"""Time between two log lines for one reason, so that a flood of connections is not a flood of lines."""
MAX_BACKLOG = 2048
_MIN_BACKLOG = 16
_COUNT_EVERY_S = 1.0
"""Interval at which file descriptors other than connections are counted."""
_SPARE_DESCRIPTORS = 32
"""Descriptors reserved for other uses: files, pipes of a worker, sockets of an exporter."""


class Closed(enum.StrEnum):
    """Why the server closed a connection, other than after `idle_timeout_s`."""

    SILENT = enum.auto()
    HEAD_TIMEOUT = enum.auto()
    HEAD_TOO_LARGE = enum.auto()
    MALFORMED = enum.auto()
    PIPELINED = enum.auto()
    BODY_TIMEOUT = enum.auto()
    NOT_READ = enum.auto()
    MADE_ROOM = enum.auto()
    NO_ROOM = enum.auto()


_WORDS = {
    Closed.SILENT: "nothing was sent on it",
    Closed.HEAD_TIMEOUT: "a request's head was not complete in time",
    Closed.HEAD_TOO_LARGE: "a request's head was too large",
    Closed.MALFORMED: "what was sent is not HTTP",
    Closed.PIPELINED: "too many requests were sent ahead of their answers",
    Closed.BODY_TIMEOUT: "a body was still being sent long after its answer",
    Closed.NOT_READ: "the client did not read its answer",
    Closed.MADE_ROOM: "connections or file descriptors ran short, and it was the one idle for longest",
    Closed.NO_ROOM: "connections or file descriptors ran short, and none was idle",
}


class Closable(Protocol):
    """A connection, as far as it is chosen to be closed."""

    def give_way(self) -> None:
        """Close at once, to make room for another connection."""


class Connections:
    """Counts connections, and closes and logs the longest idle one where a new one exceeds the limit. Used from the
    event loop only.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        for reason in Closed:
            metrics.on_closed_connection(str(reason), 0)
        self._max = config.max_connections
        self._num_descriptors = descriptor_limit()
        self.backlog = MAX_BACKLOG
        """The listen backlog: so many connections can be accepted before the first one is handled."""
        if self._num_descriptors is not None:
            self.backlog = max(_MIN_BACKLOG, min(MAX_BACKLOG, self._num_descriptors // 4))
        self._num_own = num_descriptors()
        self._counted_s = time.monotonic()
        self._open: set[Closable] = set()
        self._idle: dict[Closable, None] = {}  # the longest idle first
        self._sending: dict[Closable, None] = {}  # the same, for connections with an incomplete request
        self._untold: dict[Closed, int] = {}
        self._timers: dict[Closed, asyncio.TimerHandle] = {}

    def add(self, connection: Closable) -> bool:
        """Add a new connection; False where the limit is reached and none is idle."""
        self._open.add(connection)
        self._metrics.set_connections(len(self._open))
        room = self._room()
        while room is not None and len(self._open) > room:
            oldest = next(iter(self._idle), None) or next(iter(self._sending), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.give_way()
        return True

    def remove(self, connection: Closable) -> None:
        """Remove a connection; an unknown one is ignored."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)
        self._metrics.set_connections(len(self._open))

    def is_idle(self, connection: Closable) -> None:
        """No request is under way on it: it is closed first."""
        self._sending.pop(connection, None)
        self._idle.setdefault(connection)

    def is_sending(self, connection: Closable) -> None:
        """The body of its request is incomplete: it is closed where no connection is idle."""
        self._idle.pop(connection, None)
        self._sending.setdefault(connection)

    def is_answered(self, connection: Closable) -> None:
        """Its request is complete and runs: it is not closed."""
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)

    def note(self, reason: Closed) -> None:
        """Count a connection that the server closes, and log it: at once, or with others every few seconds."""
        self._metrics.on_closed_connection(str(reason))
        self._untold[reason] = self._untold.get(reason, 0) + 1
        if reason not in self._timers:
            self._tell(reason)

    def _tell(self, reason: Closed) -> None:
        num = self._untold.pop(reason, 0)
        if num == 0:
            del self._timers[reason]
            return
        self._timers[reason] = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._tell, reason)
        fields = {"reason": str(reason), "num_closed": num, "num_open": len(self._open)}
        if reason in (Closed.MADE_ROOM, Closed.NO_ROOM):
            fields |= {"max_connections": self._max, "file_descriptors": self._num_descriptors}
        what = "a connection was" if num == 1 else f"{num} connections were"
        logger.warning("%s closed: %s", what, _WORDS[reason], extra={"fields": fields})

    def _room(self) -> int | None:
        """The present limit of connections; None without one."""
        if self._num_descriptors is None or self._num_own is None:
            return self._max
        now_s = time.monotonic()
        if len(self._open) > self._num_descriptors // 4 and now_s - self._counted_s > _COUNT_EVERY_S:
            self._counted_s = now_s
            self._num_own = max(0, (num_descriptors() or 0) - len(self._open))
        room = max(1, self._num_descriptors - self._num_own - self.backlog - _SPARE_DESCRIPTORS)
        return room if self._max is None else min(room, self._max)


def descriptor_limit() -> int | None:
    """The limit of open files and sockets of this process; None where it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def num_descriptors() -> int | None:
    """The number of open files and sockets; None where it is unknown."""
    try:
        return len(list(Path("/dev/fd").iterdir()))
    except OSError:
        return None
