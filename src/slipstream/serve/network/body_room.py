"""The memory that the bodies of all requests may take together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

SMALL_BYTES = 64 * 2**10
"""Bytes of every body that are not counted, so that large bodies do not crowd out small ones."""
MAX_LARGE = 32
"""Bodies of the largest size that fit at once."""
_ROOM = "slipstream.body_room"


class BodyShare:
    """The share of one request's body in the memory for all."""

    def __init__(self, room: BodyRoom) -> None:
        self.room = room
        self._num_bytes = 0
        self.is_refused = False

    def grow(self, size: int) -> bool:
        """Reserve memory for a body of `size` bytes so far; False where there is none."""
        more = max(size - SMALL_BYTES - self._num_bytes, 0)
        if self.room.num_bytes + more > self.room.max_bytes:
            self.is_refused = True
            return False
        self._num_bytes += more
        self.room.num_bytes += more
        return True

    def free(self) -> None:
        """Release the memory."""
        self.room.num_bytes -= self._num_bytes
        self._num_bytes = 0


class BodyRoom:
    """Middleware: a request's body holds its memory from its first byte until the request is over. Used from the
    event loop only."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self.max_bytes = MAX_LARGE * max_body_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _share(self, scope):
            await self._app(scope, receive, send)


@contextmanager
def _share(room: BodyRoom, scope: Scope) -> Iterator[None]:
    own = scope[_ROOM] = BodyShare(room)
    try:
        yield
    finally:
        own.free()


@contextmanager
def own_share(scope: Scope) -> Iterator[None]:
    """Give the copy of a request's scope a share of its own, for work that goes on when the request is over."""
    with _share(body_share(scope).room, scope):
        yield


def body_share(scope: Scope) -> BodyShare:
    """The share of the request of an ASGI scope."""
    own: BodyShare = scope[_ROOM]
    return own
