"""A request that is sent twice is answered once.

A client that does not know whether its request arrived sends it again under the same `Idempotency-Key`. The response to
the first is recorded while it is made, byte for byte, and given to all others, also while it is still being streamed.
The work goes on when the client that began it leaves: it will come back for it.

The middleware belongs behind the one that checks API keys: what is read and kept here is a known client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.api.errors import ApiError
from slipstream.serve.auth import account_of
from slipstream.serve.limits import forget_body, read_body
from slipstream.serve.network.body_room import own_share

HEADER = "idempotency-key"
REPLAYED_HEADER = b"x-slipstream-replayed"
MAX_KEY_CHARACTERS = 256
MESSAGE_BYTES = 256
"""Counted for each message of a response besides its body: a stream has many small ones."""


@dataclass(eq=False, slots=True)
class Recording:
    """A response in the making."""

    digest: bytes
    """Digest of the request."""
    made_s: float
    messages: list[Message] = field(default_factory=list)
    num_bytes: int = 0
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def status(self) -> int | None:
        """None before the response has begun."""
        return self.messages[0]["status"] if self.messages else None

    def add(self, message: Message) -> None:
        """Another message of the response."""
        self.messages.append(message)
        self.num_bytes += MESSAGE_BYTES + len(message.get("body", b""))
        self.wake()

    def wake(self) -> None:
        """Let those go on who wait for more."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class RecordingBounds:
    """How long responses are kept, and how many."""

    ttl_s: float = 600.0
    max_recordings: int = 1_000
    """The most answers that are kept for one account."""
    max_bytes: int = 64 * 2**20
    """The most bytes for one account."""
    max_total_bytes: int = 256 * 2**20
    """The most bytes for all accounts together."""


class Idempotency:
    """ASGI middleware around the routes. Recordings are bounded in age, and in number and bytes for each account; those
    of errors are not kept, so that the request can be sent again."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        body_timeout_s: float,
        bounds: RecordingBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bodies have the bounds of all others: `max_body_bytes`, `body_timeout_s`, and the room for all bodies."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._bounds = bounds or RecordingBounds()
        self._clock = clock
        self._recordings: dict[str, dict[bytes, Recording]] = {}
        """By account, the oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, from a recording where there is one."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        key = request.headers.get(HEADER)
        if key is None:
            await self._app(scope, receive, send)
            return
        try:
            recording, is_new = await self._find(request, key)
        except ApiError as error:
            error.note(scope)
            await error.response()(scope, receive, send)
            return
        await _play(recording, receive, send, is_new)

    async def _find(self, request: Request, key: str) -> tuple[Recording, bool]:
        """The recording of a request, and whether it is new; raises `ApiError` for what can have none."""
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            await forget_body(request)
            message = f"Idempotency-Key must have 1 to {MAX_KEY_CHARACTERS} characters, got {len(key)}"
            raise ApiError(400, message, code="invalid_value")
        body = await read_body(request, self._max_body_bytes, self._body_timeout_s)
        scope, account = request.scope, account_of(request.scope)
        # Without API keys, clients that send different ones all the same do not see each other's answers.
        name = _digest(key.encode(), request.headers.get("authorization", "").encode())
        digest = _digest(scope["path"].encode(), body)
        self._forget_old()
        own = self._recordings.setdefault(account, {})
        recording = own.get(name)
        if recording is None:
            self._make_room(account)
            recording = own[name] = Recording(digest, self._clock())
            recording.task = asyncio.create_task(self._record(own, name, recording, dict(scope), body))
            return recording, True
        if recording.digest != digest:
            message = "this Idempotency-Key was used for another request; take a new one for each request"
            raise ApiError(409, message, code="idempotency_key_reused")
        return recording, False

    async def _record(
        self, own: dict[bytes, Recording], name: bytes, recording: Recording, scope: Scope, body: bytes
    ) -> None:
        """Run the request as if its client stayed."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # its memory is counted while the application has it

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Message) -> None:
            recording.add(dict(message))

        try:
            with own_share(scope):
                await self._app(scope, receive, send)
        except Exception:
            if not recording.messages:
                status = {"type": "http.response.start", "status": 500, "headers": []}
                recording.add(status)
            raise
        finally:
            recording.is_over = True
            recording.wake()
            if not 200 <= (recording.status or 500) < 300 and own.get(name) is recording:
                del own[name]

    def _forget_old(self) -> None:
        """Drop what is too old; what is under way stays, here and below."""
        oldest_s = self._clock() - self._bounds.ttl_s
        for own in self._recordings.values():
            for name, recording in list(own.items()):
                if recording.is_over and recording.made_s < oldest_s:
                    del own[name]

    def _make_room(self, account: str) -> None:
        """Drop an account's oldest recordings while it has too many, then those of the account that has most while all
        together have too many. Raises `ApiError` 429 where requests under way alone take the account's room."""
        own = self._recordings[account]
        while len(own) >= self._bounds.max_recordings or _num_bytes(own) > self._bounds.max_bytes:
            if not _drop_oldest(own):
                message = "too many requests with an Idempotency-Key are under way; try again soon"
                headers = {"Retry-After": "1"}
                raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        while sum(map(_num_bytes, self._recordings.values())) > self._bounds.max_total_bytes:
            # The account that has most may have nothing but requests under way, which stay.
            if not any(map(_drop_oldest, sorted(self._recordings.values(), key=_num_bytes, reverse=True))):
                return


def _num_bytes(recordings: dict[bytes, Recording]) -> int:
    return sum(recording.num_bytes for recording in recordings.values())


def _drop_oldest(recordings: dict[bytes, Recording]) -> bool:
    """Drop the oldest recording that is over; False where there is none."""
    name = next((name for name, recording in recordings.items() if recording.is_over), None)
    if name is not None:
        del recordings[name]
    return name is not None


async def _play(recording: Recording, receive: Receive, send: Send, is_new: bool) -> None:
    """Send a recording from its beginning, as it grows; a client that leaves ends that and nothing else."""
    leaving = asyncio.create_task(_left(receive))
    number = 0
    try:
        while not leaving.done():
            changed = recording.changed
            while number < len(recording.messages):
                message = recording.messages[number]
                number += 1
                if message["type"] == "http.response.start" and not is_new:
                    message = {**message, "headers": [*message["headers"], (REPLAYED_HEADER, b"true")]}
                await send(message)
            if recording.is_over and number == len(recording.messages):
                return
            waiting = asyncio.ensure_future(changed.wait())
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    finally:
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()
