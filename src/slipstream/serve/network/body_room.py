"""The memory that the bodies of all requests may take together."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

SMALL_BYTES = 64 * 2**10
"""What every body may have: large ones take no room from small ones."""
MAX_LARGE = 32
"""How many bodies of the largest size there is room for."""
_ROOM = "slipstream.body_room"


class Taken:
    """What one request's body takes of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0
        self.is_refused = False

    def grow(self, size: int) -> bool:
        """Take room for a body that has `size` bytes by now; False where there is none."""
        more = max(size - SMALL_BYTES - self._num_bytes, 0)
        if self._room.num_bytes + more > self._room.max_bytes:
            self.is_refused = True
            return False
        self._num_bytes += more
        self._room.num_bytes += more
        return True

    def free(self) -> None:
        """Give it back."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0


class BodyRoom:
    """Middleware: a request's body takes room from its first byte until the request is over. Used from the event loop
    only."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self.max_bytes = MAX_LARGE * max_body_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = scope[_ROOM] = Taken(self)
        try:
            await self._app(scope, receive, send)
        finally:
            own.free()


def taken(scope: Scope) -> Taken:
    """What the body of the request of an ASGI scope takes."""
    own: Taken = scope[_ROOM]
    return own
