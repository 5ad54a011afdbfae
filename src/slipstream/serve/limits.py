"""How much is taken in: the size of a body, and the answers that run and wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from slipstream.serve.errors import ApiError, unavailable


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises `ApiError` 413 as soon as it is known to be larger than `max_bytes`."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:  # nobody will read this; the log will
        raise ApiError(400, "the client left before its body was complete", code="client_left") from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes:,} bytes"
    # Closing spares reading what is left of the body.
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
