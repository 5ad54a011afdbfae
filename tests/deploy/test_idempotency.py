"""A request that is sent twice is answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from slipstream.deploy.idempotency import Idempotency


class Routes:
    """Streams three parts, each when `go` is set, and counts how often it was asked."""

    def __init__(self, status: int = 200) -> None:
        self.num_asked = 0
        self.status = status
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        asked = (await receive())["body"]
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"a", b"b")]})
        for number in range(3):
            await self.go.wait()
            await asyncio.sleep(0)
            await send(
                {"type": "http.response.body", "body": asked + str(number).encode(), "more_body": number < 2}
            )


async def call(
    app: Idempotency,
    key: str | None = "k",
    body: bytes = b"x",
    who: str = "me",
    leaves_after: int | None = None,
) -> list[Message]:
    headers = [(b"authorization", who.encode())]
    if key is not None:
        headers.append((b"idempotency-key", key.encode()))
    got: list[Message] = []
    asked, leaves = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)
        if leaves_after is not None and len(got) >= leaves_after:
            leaves.set()

    await app({"type": "http", "method": "POST", "path": "/p", "headers": headers}, receive, send)
    return got


def text(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def run(scenario: Callable[[Routes, Idempotency], Any], status: int = 200, **bounds: Any) -> None:
    async def main() -> None:
        routes = Routes(status)
        await scenario(routes, Idempotency(routes, **bounds))

    asyncio.run(main())


def test_two_at_once_and_one_later_get_the_same_answer_once_made() -> None:
    async def scenario(routes: Routes, app: Idempotency) -> None:
        first, second = asyncio.create_task(call(app)), asyncio.create_task(call(app))
        await asyncio.sleep(0.01)
        routes.go.set()
        assert text(await first) == text(await second) == text(await call(app)) == b"x0x1x2"
        assert routes.num_asked == 1
        replayed = [
            dict(messages[0]["headers"]).get(b"x-slipstream-replayed")
            for messages in (await first, await second)
        ]
        assert replayed == [None, b"true"]

    run(scenario)


def test_an_answer_whose_client_left_is_there_when_it_comes_back() -> None:
    async def scenario(routes: Routes, app: Idempotency) -> None:
        assert text(await call(app, leaves_after=1)) == b""
        routes.go.set()
        assert text(await call(app)) == b"x0x1x2"
        assert routes.num_asked == 1

    run(scenario)


def test_keys_are_their_senders_own_and_for_one_request() -> None:
    async def scenario(routes: Routes, app: Idempotency) -> None:
        routes.go.set()
        await call(app)
        assert text(await call(app, who="another")) == b"x0x1x2"
        assert routes.num_asked == 2
        [start, body] = await call(app, body=b"y")
        assert (start["status"], routes.num_asked) == (409, 2)
        assert b"used for another request" in body["body"]
        await call(app, key=None)
        await call(app, key=None)
        assert routes.num_asked == 4
        assert (await call(app, key="k" * 300))[0]["status"] == 400
        assert (await call(app, body=b"z" * (4 * 2**20 + 1)))[0]["status"] == 413

    run(scenario)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_is_not_kept(status: int) -> None:
    async def scenario(routes: Routes, app: Idempotency) -> None:
        routes.go.set()
        await call(app)
        await call(app)
        assert routes.num_asked == 2

    run(scenario, status=status)


def test_what_is_kept_is_bounded_by_age_number_and_bytes() -> None:
    now = [0.0]

    async def scenario(routes: Routes, app: Idempotency) -> None:
        routes.go.set()
        await call(app)
        now[0] = 11.0
        await call(app)
        assert routes.num_asked == 2, "the first one was too old"
        await call(app, "2")
        await call(app, "3")
        await call(app)
        assert routes.num_asked == 5, "the oldest of three had to go"
        await call(app, "4", body=b"w" * 100)
        await call(app, "5")
        await call(app, "4", body=b"w" * 100)
        assert routes.num_asked == 8, "and the largest"

    run(scenario, ttl_s=10.0, max_recordings=2, max_bytes=200, clock=lambda: now[0])
