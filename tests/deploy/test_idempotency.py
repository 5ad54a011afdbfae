"""A request that is sent twice is answered once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from slipstream.deploy.idempotency import MESSAGE_BYTES, Idempotency, RecordingBounds
from slipstream.serve.auth import KeyGuard
from slipstream.serve.network.body_room import SMALL_BYTES, BodyRoom, body_share
from slipstream.serve.routes import RouteTable, ServedRoute

MAX_BODY_BYTES = 1000
KEYS = ("alice", "bob")


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


class Server:
    """`Idempotency` behind API keys and the room for bodies, as in a front."""

    def __init__(
        self,
        routes: Routes,
        keys: tuple[str, ...] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        **bounds: Any,
    ) -> None:
        table = RouteTable([ServedRoute("POST", "/p", needs_key=True)])
        recorded = Idempotency(routes, max_body_bytes, body_timeout_s, RecordingBounds(**bounds), clock)
        self.room = BodyRoom(KeyGuard(recorded, keys, table), MAX_BODY_BYTES)


async def call(
    app: Server,
    key: str | None = "k",
    body: bytes = b"x",
    who: str = "me",
    leaves_after: int | None = None,
    incoming: list[Message] | None = None,
) -> list[Message]:
    """The response to a request whose body comes in the messages `incoming`, all of them at once unless given."""
    headers = [(b"authorization", f"Bearer {who}".encode())]
    if key is not None:
        headers.append((b"idempotency-key", key.encode()))
    got: list[Message] = []
    leaves = asyncio.Event()
    incoming = [{"type": "http.request", "body": body, "more_body": False}] if incoming is None else incoming

    async def receive() -> Message:
        if incoming:
            return incoming.pop(0)
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)
        if leaves_after is not None and len(got) >= leaves_after:
            leaves.set()

    await app.room({"type": "http", "method": "POST", "path": "/p", "headers": headers}, receive, send)
    return got


def text(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def run(scenario: Callable[[Routes, Server], Any], status: int = 200, **bounds: Any) -> None:
    async def main() -> None:
        routes = Routes(status)
        await scenario(routes, Server(routes, **bounds))

    asyncio.run(main())


def test_two_at_once_and_one_later_get_the_same_answer_once_made() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
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
    async def scenario(routes: Routes, app: Server) -> None:
        assert text(await call(app, leaves_after=1)) == b""
        routes.go.set()
        assert text(await call(app)) == b"x0x1x2"
        assert routes.num_asked == 1

    run(scenario)


def test_keys_are_their_senders_own_and_for_one_request() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
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

    run(scenario)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_is_not_kept(status: int) -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        routes.go.set()
        await call(app)
        await call(app)
        assert routes.num_asked == 2

    run(scenario, status=status)


def test_what_is_kept_is_bounded_by_age_number_and_bytes() -> None:
    now = [0.0]

    async def scenario(routes: Routes, app: Server) -> None:
        routes.go.set()
        await call(app)
        now[0] = 11.0
        await call(app)
        assert routes.num_asked == 2, "the first one was too old"
        await call(app, "2")
        await call(app, "3")
        await call(app)
        assert routes.num_asked == 5, "the oldest of three had to go"
        await call(app, "4", body=b"w" * 900)
        await call(app, "5")
        await call(app, "4", body=b"w" * 900)
        assert routes.num_asked == 8, "and the largest"

    max_bytes = 8 * MESSAGE_BYTES + 100
    run(scenario, ttl_s=10.0, max_recordings=2, max_bytes=max_bytes, clock=lambda: now[0])


def test_no_byte_of_a_body_is_read_before_the_api_key_is_known() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        incoming: list[Message] = [{"type": "http.request", "body": b"x", "more_body": True}]
        [start, body] = await call(app, who="stranger", incoming=incoming)
        assert (start["status"], len(incoming)) == (401, 1)
        assert b"this API key is not known" in body["body"]

    run(scenario, keys=KEYS)


def test_a_body_has_the_bounds_and_the_deadline_of_any_other() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        [start, _] = await call(app, body=b"z" * (MAX_BODY_BYTES + 1))
        assert start["status"] == 413
        endless: list[Message] = [{"type": "http.request", "body": b"z", "more_body": True}]
        [start, body] = await call(app, incoming=endless)
        assert (start["status"], b"was not complete" in body["body"]) == (408, True)
        assert (routes.num_asked, app.room.num_bytes) == (0, 0)

    run(scenario, body_timeout_s=0.01)


def test_the_memory_of_a_body_is_counted_while_the_work_goes_on_without_its_client() -> None:
    counted: list[int] = []
    size = SMALL_BYTES + 100

    class Counting(Routes):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            body_share(scope).grow(size)
            await super().__call__(scope, receive, send)

    async def main() -> None:
        routes = Counting()
        app = Server(routes, max_body_bytes=size)
        app.room.max_bytes = 10 * size
        await call(app, body=b"x" * size, leaves_after=1)
        counted.append(app.room.num_bytes)
        routes.go.set()
        await call(app, body=b"x" * size)
        counted.append(app.room.num_bytes)

    asyncio.run(main())
    assert counted == [100, 0]


def test_each_api_key_has_room_of_its_own_for_recordings() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        routes.go.set()
        await call(app, "of bob", who="bob")
        for number in range(10):
            await call(app, str(number), who="alice")
        assert routes.num_asked == 11
        await call(app, "of bob", who="bob")
        await call(app, "8", who="alice")
        await call(app, "9", who="alice")
        assert routes.num_asked == 11, "bob's recording and the last two of alice are there"
        await call(app, "7", who="alice")
        assert routes.num_asked == 12

    run(scenario, keys=KEYS, max_recordings=2)


def test_where_all_have_too_much_the_one_with_most_loses_first() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        routes.go.set()
        await call(app, "of bob", who="bob")
        for number in range(10):
            await call(app, str(number), who="alice")
        await call(app, "of bob", who="bob")
        assert routes.num_asked == 11

    run(scenario, keys=KEYS, max_total_bytes=13 * MESSAGE_BYTES)


def test_requests_under_way_of_the_one_with_most_do_not_end_the_eviction() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        routes.go.set()
        await call(app, "0", who="bob")
        routes.go.clear()
        for number in range(10):
            await call(app, str(number), who="alice", leaves_after=1)
        routes.go.set()
        assert routes.num_asked == 11
        await call(app, "0", who="bob")
        assert routes.num_asked == 12, "bob's was dropped, since alice has only what is under way"

    run(scenario, keys=KEYS, max_total_bytes=13 * MESSAGE_BYTES)


def test_an_api_key_whose_requests_under_way_take_its_room_is_told_so() -> None:
    async def scenario(routes: Routes, app: Server) -> None:
        for key in ("1", "2"):
            await call(app, key, who="alice", leaves_after=1)
        [start, body] = await call(app, "3", who="alice")
        assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"1")
        assert b"Idempotency-Key are under way" in body["body"]
        routes.go.set()
        assert text(await call(app, "2", who="alice")) == text(await call(app, "4", who="bob")) == b"x0x1x2"
        assert text(await call(app, "3", who="alice")) == b"x0x1x2"

    run(scenario, keys=KEYS, max_recordings=2)
