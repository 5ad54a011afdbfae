"""All connections of a server: how many there may be, which one goes first, and what the log says of it."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.serve.config import ServeConfig
from slipstream.serve.metrics.metrics import Metrics

if TYPE_CHECKING:
    from slipstream.serve.network.connection import Connection

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
"""Between two lines for one reason: a flood of connections must not become a flood of lines."""
MAX_BACKLOG = 2048
_MIN_BACKLOG = 16
_COUNT_EVERY_S = 1.0
"""How often the descriptors that are not connections are counted again."""
_SPARE_DESCRIPTORS = 32
"""What the process may open meanwhile: files, pipes of a worker, sockets of an exporter."""


class Closed(enum.StrEnum):
    """Why the server closed a connection of its own accord, other than after `idle_timeout_s`."""

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


class Connections:
    """Counts connections, closes the longest idle one where a new one finds no room, and says so in the log.

    Used from the event loop only.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        for reason in Closed:
            metrics.on_closed_connection(str(reason), 0)
        self._max = config.max_connections
        self._num_descriptors = descriptor_limit()
        self.backlog = MAX_BACKLOG
        """Connections that the system may hold for us: so many can be accepted before the first one is looked at."""
        if self._num_descriptors is not None:
            self.backlog = max(_MIN_BACKLOG, min(MAX_BACKLOG, self._num_descriptors // 4))
        self._num_own = num_descriptors()
        self._counted_s = time.monotonic()
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._sending: dict[Connection, None] = {}  # the same for those whose request is not complete
        self._untold: dict[Closed, int] = {}
        self._timers: dict[Closed, asyncio.TimerHandle] = {}

    def add(self, connection: Connection) -> bool:
        """Take in a new connection; False where there is no room, even without those that were idle for longest."""
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

    def remove(self, connection: Connection) -> None:
        """A connection is over; one that is not known any more is no error."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)
        self._metrics.set_connections(len(self._open))

    def is_idle(self, connection: Connection) -> None:
        """Nothing is under way on it: the first to go."""
        self._sending.pop(connection, None)
        self._idle.setdefault(connection)

    def is_sending(self, connection: Connection) -> None:
        """Its request's body is on the way: it goes where nobody is idle."""
        self._idle.pop(connection, None)
        self._sending.setdefault(connection)

    def is_answered(self, connection: Connection) -> None:
        """Its request is complete and at work: it stays."""
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
        facts = {"reason": str(reason), "num_closed": num, "num_open": len(self._open)}
        if reason in (Closed.MADE_ROOM, Closed.NO_ROOM):
            facts |= {"max_connections": self._max, "file_descriptors": self._num_descriptors}
        what = "a connection was" if num == 1 else f"{num} connections were"
        logger.warning("%s closed: %s", what, _WORDS[reason], extra={"facts": facts})

    def _room(self) -> int | None:
        """How many connections there may be now; None where nothing bounds them."""
        if self._num_descriptors is None or self._num_own is None:
            return self._max
        now_s = time.monotonic()
        if len(self._open) > self._num_descriptors // 4 and now_s - self._counted_s > _COUNT_EVERY_S:
            self._counted_s = now_s
            self._num_own = max(0, (num_descriptors() or 0) - len(self._open))
        room = max(1, self._num_descriptors - self._num_own - self.backlog - _SPARE_DESCRIPTORS)
        return room if self._max is None else min(room, self._max)


def descriptor_limit() -> int | None:
    """How many files and sockets this process may have open; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def num_descriptors() -> int | None:
    """How many of them are open; None where the system does not say."""
    try:
        return len(list(Path("/dev/fd").iterdir()))
    except OSError:
        return None
