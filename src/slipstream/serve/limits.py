"""How much is taken in: the size of a body, and the answers that run and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastapi import Request
from starlette.requests import ClientDisconnect

from slipstream.serve.errors import ApiError, unavailable

DRAIN_BYTES = 64 * 2**20
DRAIN_S = 5.0
"""What is read of a body that is too large, and for how long, before it is refused. Closing a connection on bytes that
nobody has read resets it, and many a client then never sees the refusal."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises `ApiError` 413 when it is larger than `max_bytes`, of which no more is kept."""
    announced = request.headers.get("content-length", "")
    length = int(announced) if announced.isdecimal() else None
    if length is not None and length > max_bytes:
        waits = request.headers.get("expect", "").lower() == "100-continue"  # nothing has been sent
        if length <= DRAIN_BYTES and not waits:
            await _drain(request)
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                body.clear()
                await _drain(request)
                raise _too_large(max_bytes)
    except ClientDisconnect:  # nobody will read this; the log will
        raise ApiError(400, "the client left before its body was complete", code="client_left") from None
    return bytes(body)


async def _drain(request: Request) -> None:
    """Read and forget, within bounds."""
    num_bytes = 0
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DRAIN_S):
            while num_bytes <= DRAIN_BYTES:
                message = await request.receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes:,} bytes"
    # Closing spares reading what is still left of the body.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class Admission:
    """Counts the answers under way, and refuses what would be too many. Used from the event loop only."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.capacity = max_running + max_waiting
        self.num_answers = 0
        """Under way: running or waiting for their turn."""
        self.draining = False
        """True once nothing new is taken in."""

    @contextmanager
    def admit(self, num_answers: int) -> Iterator[None]:
        """Hold places for a request's answers; raises `ApiError` 400, 429 or 503 where there are none."""
        self.check_open()
        if num_answers > self.capacity:
            message = f"the request asks for {num_answers} answers; this server takes {self.capacity} at once"
            raise ApiError(400, message, param="n", code="invalid_value")
        if self.num_answers + num_answers > self.capacity:
            raise ApiError(
                429,
                "too many requests are waiting; try again soon",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_answers += num_answers
        try:
            yield
        finally:
            self.num_answers -= num_answers

    def check_open(self) -> None:
        """Raise `ApiError` 503 once the server is shutting down."""
        if self.draining:
            raise unavailable("the server is shutting down")
