"""A request that is sent twice is answered once.

A client that does not know whether its request arrived sends it again under the same `Idempotency-Key`. The response to
the first is recorded while it is made, byte for byte, and given to all others, also while it is still being streamed.
The work goes on when the client that began it leaves: it will come back for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "idempotency-key"
REPLAYED_HEADER = b"x-slipstream-replayed"
MAX_KEY_CHARACTERS = 256
MAX_BODY_BYTES = 4 * 2**20
"""A larger request is not recorded: it is refused with a key."""


@dataclass(eq=False, slots=True)
class Recording:
    """A response in the making."""

    digest: bytes
    """Of the request."""
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
        self.num_bytes += len(message.get("body", b""))
        self.wake()

    def wake(self) -> None:
        """Let those go on who wait for more."""
        self.changed.set()
        self.changed = asyncio.Event()


class Idempotency:
    """ASGI middleware around the routes. Recordings are bounded in number, bytes and age; those of errors are not kept,
    so that the request can be sent again."""

    def __init__(
        self,
        app: ASGIApp,
        ttl_s: float = 600.0,
        max_recordings: int = 10_000,
        max_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._ttl_s = ttl_s
        self._max_recordings = max_recordings
        self._max_bytes = max_bytes
        self._clock = clock
        self._recordings: OrderedDict[bytes, Recording] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, from a recording where there is one."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = headers.get(HEADER)
        if key is None:
            await self._app(scope, receive, send)
            return
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            message = f"Idempotency-Key must have 1 to {MAX_KEY_CHARACTERS} characters, got {len(key)}"
            await _refuse(400, message, "invalid_value")(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            message = f"a request with an Idempotency-Key has at most {MAX_BODY_BYTES:,} bytes"
            await _refuse(413, message, "request_too_large")(scope, receive, send)
            return
        # The key's client: two clients that choose the same key do not see each other's answers.
        name = _digest(key.encode(), headers.get("authorization", "").encode())
        digest = _digest(scope["path"].encode(), body)
        self._forget()
        recording = self._recordings.get(name)
        if recording is not None and recording.digest != digest:
            message = "this Idempotency-Key was used for another request; take a new one for each request"
            await _refuse(409, message, "idempotency_key_reused")(scope, receive, send)
            return
        is_new = recording is None
        if recording is None:
            recording = self._recordings[name] = Recording(digest, self._clock())
            recording.task = asyncio.create_task(self._record(name, recording, dict(scope), body))
        await _play(recording, receive, send, is_new)

    async def _record(self, name: bytes, recording: Recording, scope: Scope, body: bytes) -> None:
        """Run the request as if its client stayed."""
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            recording.add(dict(message))

        try:
            await self._app(scope, receive, send)
        except Exception:
            if not recording.messages:
                status = {"type": "http.response.start", "status": 500, "headers": []}
                recording.add(status)
            raise
        finally:
            recording.is_over = True
            recording.wake()
            if not 200 <= (recording.status or 500) < 300 and self._recordings.get(name) is recording:
                del self._recordings[name]

    def _forget(self) -> None:
        """Drop what is too old, and the oldest while there is too much; those under way stay."""
        oldest_s = self._clock() - self._ttl_s
        num_bytes = sum(recording.num_bytes for recording in self._recordings.values())
        for name, recording in list(self._recordings.items()):
            many = len(self._recordings) >= self._max_recordings or num_bytes > self._max_bytes
            if recording.is_over and (recording.made_s < oldest_s or many):
                num_bytes -= recording.num_bytes
                del self._recordings[name]


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


async def _read(receive: Receive) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def _refuse(status: int, message: str, code: str) -> JSONResponse:
    kind = "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
