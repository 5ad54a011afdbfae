"""Limits on requests: the size of a body, and the number of answers that run and wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastapi import Request
from starlette.requests import ClientDisconnect

from slipstream.serve.api.errors import CLIENT_LEFT, ApiError, invalid, unavailable
from slipstream.serve.network.body_room import body_share

DRAIN_BYTES = 64 * 2**20
DRAIN_S = 5.0
"""How much of a body that is too large is read before it is refused, and for how long. Closing a connection with
unread bytes resets it, and many clients then do not see the error."""


def check_json(request: Request) -> None:
    """Raise `ApiError` 415 for a Content-Type other than application/json.

    A browser posts text and forms for a web page of any origin; for JSON it sends a CORS preflight request first.
    """
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != "application/json":
        message = f"the body must be JSON and say so: send the header 'Content-Type: application/json', not {sent!r}"
        raise ApiError(415, message, code="unsupported_media_type")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; raises `ApiError` 413 where it is larger than `max_bytes`, 408 where it is not complete
    within `timeout_s` seconds, and 429 where the bodies of all requests together are too large."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        await forget_body(request)
        raise _too_large(max_bytes)
    body, room = bytearray(), body_share(request.scope)
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes or not room.grow(len(body)):
                    break
    except ClientDisconnect:  # for the log and the metrics alone
        message = "the client left before its body was complete"
        raise ApiError(CLIENT_LEFT, message, code="client_left") from None
    except TimeoutError:
        message = f"the body was not complete within {timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    if len(body) > max_bytes or room.is_refused:
        refusal = _too_large(max_bytes) if len(body) > max_bytes else _no_room()
        body.clear()
        room.free()
        await _drain(request)
        raise refusal
    return bytes(body)


async def forget_body(request: Request) -> None:
    """Read and discard the body of a request that is refused, within bounds; one that was not sent yet is not
    requested."""
    announced = request.headers.get("content-length", "")
    waits = request.headers.get("expect", "").lower() == "100-continue"
    if not waits and not (announced.isdecimal() and int(announced) > DRAIN_BYTES):
        await _drain(request)


async def _drain(request: Request) -> None:
    """Read and discard the rest of the body, within bounds."""
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
    # After closing, the rest of the body need not be read.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _no_room() -> ApiError:
    message = "the server holds too many large bodies; try again soon"
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


class Admission:
    """Counts the answers under way, and refuses requests beyond the limit, which each API key has for itself: one that
    fills its queue has no other refused. Used from the event loop only."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.capacity = max_running + max_waiting
        self.num_answers = 0
        """Answers under way: being tokenised, running, or waiting."""
        self._by_account: Counter[str] = Counter()
        self.draining = False
        """True once new requests are refused."""

    @contextmanager
    def admit(self, num_answers: int, account: str = "") -> Iterator[None]:
        """Count a request's answers as under way; raises `ApiError` 400, 429 or 503 where they are too many or the
        server drains."""
        self.check_open()
        if num_answers > self.capacity:
            message = f"the request asks for {num_answers} answers; this server takes {self.capacity} at once"
            raise invalid(message, "n")
        self.check_room(num_answers, account)
        self.num_answers += num_answers
        self._by_account[account] += num_answers
        try:
            yield
        finally:
            self.num_answers -= num_answers
            self._by_account[account] -= num_answers

    def check_room(self, num_answers: int = 1, account: str = "") -> None:
        """Raise `ApiError` 429 where so many more answers of `account` would exceed the limit."""
        if self._by_account[account] + num_answers > self.capacity:
            raise ApiError(
                429,
                "too many requests are waiting; try again soon",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def check_open(self) -> None:
        """Raise `ApiError` 503 once the server is shutting down."""
        if self.draining:
            raise unavailable("the server is shutting down")
