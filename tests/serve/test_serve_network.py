"""A hostile or broken network: endless heads, silent and half-sent connections, clients that leave or half-close."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from serve_cases import MODEL, JumpingLoop, MakeApp, counters, running, wait_until
from starlette.testclient import TestClient

from slipstream.errors import ConfigError
from slipstream.serve.api.stream import Reply
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.config import ServeConfig
from slipstream.serve.network import body_room, connections
from slipstream.serve.network.connection import MAX_HEADERS, MAX_PIPELINED

BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def post(body: bytes = BODY, headers: str = "") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """A connection; `receive_buffer` bytes are what the system reads of it ahead of the test."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(120)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    return connection


def responses(raw: bytes) -> list[tuple[int, dict[str, str], Any]]:
    """Status, headers and JSON of every response in `raw`; interim ones without the last."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        body, raw = raw[:length], raw[length:]
        found.append((int(first.split()[1]), headers, json.loads(body) if body else None))
    return found


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_closed(connection: socket.socket) -> bool:
    """Without waiting: has the server closed it, saying nothing?"""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(120)


def closed_for(app: FastAPI, reason: str) -> float:
    name = f'slipstream_closed_connections_total{{model_name="{MODEL}",reason="{reason}"}} '
    text = app.state.service.metrics.exposition().decode()
    return float(text.partition(name)[2].partition("\n")[0])


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The tokenizer waits until the event is set."""
    event = threading.Event()
    encode = Tokens._encode

    def waiting(self: Tokens, text: str, add_special_tokens: bool) -> list[int]:
        assert event.wait(120)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokens, "_encode", waiting)
    yield event
    event.set()


# --- heads ----------------------------------------------------------------------------------------------------------


def test_heads_are_bounded_and_refused_in_shape(make_app: MakeApp) -> None:
    app = make_app(max_head_bytes=2048, head_timeout_s=120.0)
    cases = {
        "endless value": b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 4096,
        "endless first line": b"GET /" + b"a" * 4096,
        "endless name": b"GET /health HTTP/1.1\r\n" + b"a" * 4096,
        "value too large": b"GET /health HTTP/1.1\r\nX: " + b"a" * 2048 + b"\r\n\r\n",
        "too many headers": b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        "too large in sum": b"GET /health HTTP/1.1\r\n" + (b"X: " + b"a" * 100 + b"\r\n") * 21 + b"\r\n",
        "endless lines before": b"\r\n" * 3000,
    }
    with running(app) as (url, _):
        for name, raw in cases.items():
            with connect(url) as connection:
                connection.sendall(raw)
                [(status, headers, said)] = responses(read_all(connection))
                assert (status, said["error"]["code"]) == (431, "head_too_large"), name
                assert "2,048 bytes" in said["error"]["message"]
                assert headers["connection"] == "close"
        assert closed_for(app, "head_too_large") == len(cases)
        with connect(url) as connection:  # what is within the bounds passes, at once and byte by byte
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 1900 + b"\r\n\r\n")
            assert responses(connection.recv(4096))[0][0] == 200
            for byte in HEALTH:
                connection.sendall(bytes([byte]))
            assert responses(connection.recv(4096))[0][0] == 200


def test_what_follows_a_body_is_bounded_too(make_app: MakeApp) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    start += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with running(make_app(max_head_bytes=2048, body_timeout_s=120.0)) as (url, _):
        for tail in (b"0\r\nX: " + b"a" * 5000, b"0\r\n" + b"a:b\r\n" * 200, b"1;" + b"x" * 5000):
            with connect(url) as connection:
                connection.sendall(start + tail)
                [(status, _, said)] = responses(read_all(connection))
                assert (status, said["error"]["code"]) == (431, "head_too_large")


def test_an_endless_header_does_not_hold_up_the_loop(make_app: MakeApp) -> None:
    """Read whole, 32 MiB of one header's value took the loop for a second and more at a time."""
    with running(make_app()) as (url, _), connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        num_bytes = 0
        while num_bytes < 32 * 2**20:
            try:
                connection.sendall(b"a" * 2**20)
            except OSError:
                break
            num_bytes += 2**20
            assert httpx2.get(f"{url}/health", timeout=120).status_code == 200
        assert num_bytes < 32 * 2**20, "it was read whole"


NOT_HTTP = [
    (b"\x16\x03\x01\x02\x00\x01\x00", "Invalid method"),  # TLS
    (b"GET /health HTTP/1.1\r\nA\x00: b\r\n\r\n", "header"),
    (b"GET /\xff HTTP/1.1\r\n\r\n", "url"),
    (b"GET http:// HTTP/1.1\r\n\r\n", "HTTP/1.1 request"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1 request"),
    (b"CONNECT a:1 HTTP/1.1\r\n\r\n", "no proxy"),
    (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
]


def test_what_is_not_http_is_refused_in_shape(make_app: MakeApp) -> None:
    app = make_app()
    with running(app) as (url, _):
        for raw, words in NOT_HTTP:
            with connect(url) as connection:
                connection.sendall(raw)
                [(status, headers, said)] = responses(read_all(connection))
            assert (status, headers["connection"]) == (400, "close")
            assert said["error"]["code"] == "invalid_http"
            assert said["error"]["type"] == "invalid_request_error"
            assert words in said["error"]["message"], raw
        assert closed_for(app, "malformed") == len(NOT_HTTP)


def test_refusals_wait_for_the_answers_before_them(make_app: MakeApp) -> None:
    with running(make_app()) as (url, _):
        with connect(url) as connection:
            connection.sendall(post() + HEALTH + b"\x00")
            first, second, third = responses(read_all(connection))
            assert (first[0], second[0], third[0]) == (200, 200, 400)
            assert len(first[2]["choices"]) == 1
        with connect(url) as connection:  # more ahead of their answers than are kept
            connection.sendall(post() + HEALTH * 1000)
            found = responses(read_all(connection))
            assert [status for status, _, _ in found] == [200] * (1 + MAX_PIPELINED) + [400]
            assert found[-1][2]["error"]["code"] == "too_many_pipelined"
        with connect(url) as connection:  # a body that goes wrong has no other answer
            start = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
            connection.sendall(HEALTH + start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
            assert [status for status, _, _ in responses(read_all(connection))] == [200, 400]


def test_a_wish_for_another_protocol_is_passed_over(make_app: MakeApp) -> None:
    """Java's client sends it with every request, and the parser stops before the body."""
    wish = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    socket_wish = HEALTH[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n"
    with running(make_app()) as (url, _), connect(url) as connection:
        raw = post(headers=wish)
        connection.sendall(raw[:-7])
        time.sleep(0.05)
        connection.sendall(raw[-7:] + socket_wish + HEALTH[:-2] + b"Connection: close\r\n\r\n")
        found = responses(read_all(connection))
        assert [status for status, _, _ in found] == [200, 200, 200]
        assert found[0][2]["usage"]["completion_tokens"] == 4


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_silent_half_sent_and_idle_connections_do_not_stay(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(body_timeout_s=10.0)  # as long as for a head
    loop = JumpingLoop()
    began, jumped = time.monotonic(), 0.0
    with running(app, loop=loop) as (url, _), ExitStack() as stack:
        silent, blank, half, idle, leftover, dripping = (stack.enter_context(connect(url)) for _ in range(6))
        blank.sendall(b"\r\n")
        half.sendall(HEALTH[:-2])
        leftover.sendall(b"POST /nowhere HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
        dripping.sendall(HEALTH[:-2])
        idle.sendall(HEALTH)
        assert idle.recv(1)  # what was sent before has been read as well

        def drip() -> bool:
            """A byte now and then gains no time."""
            try:
                dripping.sendall(b"a")
                leftover.sendall(b"a")
                blank.sendall(b"\r\n")
            except OSError:
                pass
            return _num_open(app) <= num_left

        for seconds, num_left in (
            (4.0, 6),
            (4.0, 6),
            (4.0, 1),
            (70.0, 0),
        ):  # heads have 10 s, the idle one 75 s
            num_open = _num_open(app)
            assert (
                num_open >= num_left or jumped + time.monotonic() - began >= 10
            )  # on a machine that is busy
            loop.jump(seconds)
            jumped += seconds
            wait_until(drip)
        assert read_all(silent) == b""
        for connection in (half, dripping):
            [(status, _, said)] = responses(read_all(connection))
            assert (status, said["error"]["code"]) == (408, "head_timeout")
            assert "within 10 s" in said["error"]["message"]
        assert [status for status, _, _ in responses(b"H" + read_all(idle))] == [200]
        assert closed_for(app, "silent") >= 1
        assert closed_for(app, "head_timeout") >= 2
        assert closed_for(app, "body_timeout") == 1
    told = [record for record in caplog.records if record.name == connections.logger.name]
    assert {record.fields["reason"] for record in told} >= {"silent", "head_timeout", "body_timeout"}  # type: ignore[attr-defined]


def _num_open(app: FastAPI) -> float:
    return next(
        sample.value
        for family in app.state.service.metrics._registry.collect()
        if family.name == "slipstream_connections"
        for sample in family.samples
    )


def test_a_connection_in_use_outlives_the_deadlines(make_app: MakeApp) -> None:
    app, loop = make_app(idle_timeout_s=10.0), JumpingLoop()
    with running(app, loop=loop) as (url, _), connect(url) as connection:
        for _ in range(7):
            connection.sendall(HEALTH)
            response = HTTPResponse(connection)
            response.begin()
            assert (response.status, response.read() != b"") == (200, True)
            loop.jump(4.0)


def test_who_does_not_read_is_not_waited_for(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.serve.network.connection.NOT_READ_S", 0.3)
    app = make_app()
    with running(app, send_buffer=4096) as (url, _), connect(url) as connection:
        for _ in range(12):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: closed_for(app, "not_read") == 1)
        wait_until(lambda: _num_open(app) == 0)
        assert closed_for(app, "not_read") == 1


def test_who_reads_slowly_gets_all_before_the_connection_closes(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.serve.network.connection.LINGER_S", 0.1)
    with running(make_app(), send_buffer=4096) as (url, _), connect(url, 4096) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        time.sleep(0.6)
        [(status, _, said)] = responses(read_all(connection))
        assert status == 200
        assert said["paths"]


def test_who_reads_nothing_of_the_last_answer_is_not_waited_for(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.serve.network.connection.NOT_READ_S", 0.3)
    app = make_app()
    with running(app, send_buffer=4096) as (url, _), connect(url, 4096) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        wait_until(lambda: closed_for(app, "not_read") == 1)
        wait_until(lambda: _num_open(app) == 0)
        assert closed_for(app, "not_read") == 1


# --- room -----------------------------------------------------------------------------------------------------------


def test_the_longest_idle_makes_room(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(max_connections=5)
    with running(app) as (url, _), held(monkeypatch) as event, ExitStack() as stack:
        used, silent, half, body = (stack.enter_context(connect(url)) for _ in range(4))
        wait_until(lambda: _num_open(app) == 4)
        half.sendall(HEALTH[:-2])
        body.sendall(post()[:-5])
        used.sendall(HEALTH)  # idle again, for a shorter time than the silent ones
        assert used.recv(4096)
        working = stack.enter_context(connect(url))
        working.sendall(post())
        wait_until(lambda: app.state.service.admission.num_answers == 1)
        for victim in (silent, half, used, body):  # those with half a body last
            assert not is_closed(victim)
            newer = stack.enter_context(connect(url))
            newer.sendall(post())
            wait_until(partial(is_closed, victim))
        wait_until(lambda: app.state.service.admission.num_answers == 5)
        with connect(url) as surplus:  # now all are at work
            [(status, headers, said)] = responses(read_all(surplus))
            assert (status, said["error"]["code"]) == (503, "unavailable")
            assert headers["retry-after"] == "1"
        assert (closed_for(app, "made_room"), closed_for(app, "no_room")) == (4, 1)
        event.set()
        assert responses(working.recv(65536))[0][0] == 200
        wait_until(lambda: app.state.service.admission.num_answers == 0)
    lines = [record for record in caplog.records if record.name == connections.logger.name]
    assert {record.fields["reason"] for record in lines} == {"made_room", "no_room"}  # type: ignore[attr-defined]
    assert all(record.levelno == logging.WARNING for record in lines)


def test_descriptors_that_run_short_make_room_too(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = connections.num_descriptors()
    assert own is not None
    room, backlog = 40, (own + 96) // 3  # a quarter of all is kept for those that come at once
    monkeypatch.setattr(connections, "descriptor_limit", lambda: own + room + backlog + 32)
    app = make_app()
    most = 0.0
    with running(app) as (url, _), ExitStack() as stack:
        for _ in range(4 * room):
            stack.enter_context(connect(url))
            with connect(url) as well_behaved:
                well_behaved.sendall(HEALTH)
                assert responses(well_behaved.recv(4096))[0][0] == 200
            most = max(most, _num_open(app))
        assert room // 2 < most <= room + 8
        assert closed_for(app, "made_room") >= 3 * room - 8
    lines = [record for record in caplog.records if record.name == connections.logger.name]
    assert 1 <= len(lines) <= 4, "a flood of connections is a few lines"
    assert "file_descriptors" in lines[0].fields  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [{"max_head_bytes": 100}, {"head_timeout_s": 0}, {"idle_timeout_s": -1}, {"max_connections": 0}],
    ids=str,
)
def test_bounds_that_cannot_be_met_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig(**wrong)


# --- clients that leave, and those that only stop sending -------------------------------------------------------------


def test_a_client_that_shuts_down_its_writing_side_gets_its_answer(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = json.dumps({**json.loads(BODY), "stream": True}).encode()
    app = make_app()
    with running(app) as (url, _):
        for raw in (post(), post() + post(), HEALTH, post(streamed)):
            with connect(url) as connection:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                said = read_all(connection)
            final = said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            assert final.count(b"HTTP/1.1 200 OK") == max(1, raw.count(b"POST"))
            assert final.endswith((b"}", b"data: [DONE]\n\n\r\n0\r\n\r\n"))
        with held(monkeypatch) as event, connect(url) as connection:  # also when it has to wait
            connection.sendall(post())
            connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: app.state.service.admission.num_answers == 1)
            event.set()
            assert b'"completion_tokens":4' in read_all(connection)
    wait_until(lambda: _num_open(app) == 0)


def test_a_client_that_leaves_differs_from_one_that_only_stops_sending(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    with running(app) as (url, _), held(monkeypatch):
        for raw in (post(), post() + post(), post() + HEALTH):
            with connect(url) as connection:
                connection.sendall(raw)
                wait_until(lambda: app.state.service.admission.num_answers == 1)
                time.sleep(0.1)
                assert app.state.service.admission.num_answers == 1, "it is there, though it sends no more"
            wait_until(lambda: app.state.service.admission.num_answers == 0)


def test_a_client_that_leaves_within_its_body_counts_as_499(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    app = make_app()
    with running(app) as (url, _):
        with connect(url) as connection:
            connection.sendall(post()[:-5])
            time.sleep(0.1)
        wait_until(lambda: 'status="499"} 1.0' in httpx2.get(f"{url}/metrics", timeout=120).text)
    [line] = [record for record in caplog.records if record.getMessage() == "request"]
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["error_code"]) == (499, "client_left")


# --- what else clients expect of HTTP ---------------------------------------------------------------------------------


def test_a_fault_says_that_the_connection_closes(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("a fault")

    with running(make_app()) as (url, _), connect(url) as connection:
        monkeypatch.setattr(Reply, "_work", fails)
        connection.sendall(post())
        [(status, headers, said)] = responses(read_all(connection))
    assert (status, headers["connection"], said["error"]["code"]) == (500, "close", "internal_error")


def test_head_and_the_root(make_app: MakeApp) -> None:
    app = make_app(api_key=("secret",))
    with running(app) as (url, _), httpx2.Client(base_url=url) as client:
        key = {"Authorization": "Bearer secret"}
        for path in (
            "/health",
            "/ready",
            "/version",
            "/metrics",
            "/v1/models",
            "/dashboard",
            "/openapi.json",
        ):
            head, get = (client.request(method, path, headers=key) for method in ("HEAD", "GET"))
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
            if path != "/metrics":
                assert head.headers["content-length"] == str(len(get.content))
        assert client.head("/v1/models").status_code == 401
        assert client.head("/v1/completions", headers=key).status_code == 405
        root = client.get("/", follow_redirects=True)
        assert (root.status_code, str(root.url)) == (200, f"{url}/dashboard")
    with TestClient(make_app()) as plain:
        assert plain.head("/health").content == b""
        assert counters(plain)["slipstream_connections"] == 0


def test_bodies_of_all_requests_are_bounded_together(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_room, "MAX_LARGE", 2)
    size = body_room.SMALL_BYTES + 100_000
    large = post(BODY + b" " * (size - len(BODY)))
    rooms: list[body_room.BodyRoom] = []
    make = body_room.BodyRoom.__init__

    def kept(self: body_room.BodyRoom, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        rooms.append(self)

    monkeypatch.setattr(body_room.BodyRoom, "__init__", kept)
    with running(make_app(max_body_bytes=size)) as (url, _), ExitStack() as stack:
        slow = [stack.enter_context(connect(url)) for _ in range(3)]
        for number, connection in enumerate(slow, start=1):
            connection.sendall(large[:-1])
            wait_until(lambda most=number * 100_000: rooms[0].num_bytes >= most - 5)  # type: ignore[misc]
        fourth = stack.enter_context(connect(url))
        fourth.sendall(large)
        [(status, headers, said)] = responses(read_all(fourth))
        assert (status, said["error"]["code"]) == (429, "queue_full")
        assert headers["connection"] == "close"
        assert headers["retry-after"] == "1"
        assert httpx2.post(f"{url}/v1/completions", json=json.loads(BODY)).status_code == 200  # a small one
        for connection in slow:
            connection.sendall(large[-1:])
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        wait_until(lambda: rooms[0].num_bytes == 0)
