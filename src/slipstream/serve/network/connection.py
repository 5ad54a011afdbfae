"""A client's connection: uvicorn's protocol on httptools, with bounds, deadlines, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import enum
import json
import select
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slipstream.serve.api.errors import ApiError, unavailable
from slipstream.serve.config import ServeConfig
from slipstream.serve.network.connections import Closed, Connections

MAX_HEADERS = 128
"""Most header lines of a head, and of the trailers of a body."""
MAX_PIPELINED = 16
"""Most requests that a client may send before their responses."""
NOT_READ_S = 60.0
"""How long a client may leave sent bytes unread while more is waiting."""
LINGER_S = 2.0
LINGER_BYTES = 2**20
"""Time for a client to read an error while it still sends. Closing with unread bytes resets the connection, and
many clients then do not see the error."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
"""Interval of checks whether a client that has shut down its writing side has closed the connection."""


class ConnectionStage(enum.Enum):
    """The event that a connection waits for."""

    NEW = enum.auto()
    """The first byte."""
    HEAD = enum.auto()
    """The rest of a request's head."""
    BODY = enum.auto()
    """The rest of a body that the application reads."""
    ANSWER = enum.auto()
    """The application's response."""
    LEFTOVER = enum.auto()
    """The rest of a body whose response is complete."""
    IDLE = enum.auto()
    """The next request."""
    OVER = enum.auto()
    """The end of the connection."""


class Connection(HttpToolsProtocol):
    """Bounds the bytes and the time of a client before there is a request.

    - A head, its first line included, has at most `max_head_bytes` bytes and `MAX_HEADERS` headers (431) and is
      complete `head_timeout_s` after its first byte (408). A connection on which nothing is sent is closed after that
      time, one between two requests after `idle_timeout_s`. Bodies have deadlines of their own (`serve.limits`).
    - What is not HTTP, and all errors above, are answered in OpenAI's shape, after the responses that are due before.
    - A client that has sent its request and shuts down its writing side gets its response. A client that has
      disconnected looks the same until something is written to it: an interim response `100 Continue`, which every
      client of HTTP/1.1 has to skip.
    """

    def __init__(self, *args: Any, limits: ServeConfig, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._others = connections
        self._stage = ConnectionStage.NEW
        self._timer: asyncio.TimerHandle | None = None
        self._not_read: asyncio.TimerHandle | None = None
        self._in_head = False
        self._num_headers = 0
        self._head_bytes = 0
        self._unfinished_bytes = 0
        """Bytes given to the parser since the last beginning or end of a message."""
        self._came_to_something = False
        self._answering: RequestResponseCycle | None = None
        """The request that the application works on; `cycle` is the last one that was read."""
        self._refusal: ApiError | None = None
        self._deaf = False
        """True when nothing more is read as requests."""
        self._lingered_bytes = 0
        self._half_closed = False
        self.app = self._watched(self.app)

    # --- a connection's life ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._others.add(self):
            self._others.is_idle(self)
            self._arm(self._limits.head_timeout_s)
        else:
            self._refuse(Closed.NO_ROOM, unavailable("the server has no room for another connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stage = ConnectionStage.OVER
        self._others.remove(self)
        for timer in (self._timer, self._not_read):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; True keeps the connection open for the responses that are due."""
        if self._stage is not ConnectionStage.ANSWER or self.cycle.more_body or self._refusal is not None:
            return False
        if not self._half_closed:
            self._half_closed = self._deaf = True
            self.cycle.keep_alive = False
            answering = self._answering
            assert answering is not None
            if not answering.response_started and answering.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_FIRST_LOOK_S, self._look, _FIRST_LOOK_S)
        return True

    def give_way(self) -> None:
        """Close at once, to make room for another connection."""
        if self._refusal is None:
            self._others.note(Closed.MADE_ROOM)
        self.transport.abort()

    # --- what comes in ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        step = self._limits.max_head_bytes
        for start in range(0, len(data), step):
            if self._deaf or self._stage is ConnectionStage.OVER:
                return
            self._feed(data if len(data) <= step else data[start : start + step])
        if self._refusal is None:
            self._go_on()

    def _feed(self, data: bytes) -> None:
        self._came_to_something = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if self._refusal is None:
                # The parser's messages are fixed texts; an error in our own callbacks is about the first line.
                callback = isinstance(error, httptools.HttpParserCallbackError)
                why = "its first line cannot be read" if callback else str(error)
                message = f"what was sent is not an HTTP/1.1 request: {why}"
                self._refuse(Closed.MALFORMED, ApiError(400, message, code="invalid_http"))
        self._unfinished_bytes = 0 if self._came_to_something else self._unfinished_bytes + len(data)
        if self._refusal is None and self._unfinished_bytes > self._limits.max_head_bytes:
            self._refuse_head()

    def _stay_with_http(self, rest: bytes) -> None:
        """Parse a request again without its `Upgrade` header, at which the parser stops before the body. Java's
        client offers `h2c` with every request.
        """
        method = self.scope["method"]
        if method == "CONNECT":
            self._refuse(Closed.MALFORMED, ApiError(400, "this server is no proxy", code="invalid_http"))
            return
        headers = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        lines = [b"%s %s HTTP/1.1" % (method.encode(), self.url), *(b": ".join(pair) for pair in headers)]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", b""]))
        if rest and self._refusal is None:
            self._feed(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._came_to_something = self._in_head = True
        self._num_headers = self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._came_to_something = True
        if self._refusal is not None:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent ahead of their answers"
            self._refuse(Closed.PIPELINED, ApiError(400, message, code="too_many_pipelined"))
            return
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        num_waiting = len(self.pipeline)
        super().on_headers_complete()
        self._in_head = False
        if len(self.pipeline) == num_waiting:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._came_to_something = True
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._came_to_something = True
        if self._refusal is None and not self._in_head:
            if self.cycle.response_complete:
                self.cycle.more_body = False  # uvicorn does not count any more after the response
            super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._refusal is None and (
            self._head_bytes > self._limits.max_head_bytes or self._num_headers > MAX_HEADERS
        ):
            self._refuse_head()

    # --- what goes out ------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the deadlines here are stricter
        if self.transport.is_closing():  # the client may have much to read still
            self._others.is_idle(self)
            self._arm(NOT_READ_S)
            return
        self._answering = following
        if following is None and self._refusal is not None:
            self._write_refusal()
        else:
            self._go_on()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._not_read is None:
            self._not_read = self.loop.call_later(NOT_READ_S, self._close_for, Closed.NOT_READ)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._not_read is not None:
            self._not_read.cancel()
            self._not_read = None

    def _watched(self, app: Any) -> Any:
        async def run(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:  # without a complete response uvicorn closes, and waits for the client to read
                answering = self._answering
                own = answering if answering is not None and answering.scope is scope else None
                if own is not None and not own.response_complete and self._stage is not ConnectionStage.OVER:
                    self._arm(LINGER_S)

        return run

    # --- refusals -----------------------------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        most = f"{self._limits.max_head_bytes:,} bytes and {MAX_HEADERS} headers"
        message = f"the request's first line and headers are more than {most}"
        self._refuse(Closed.HEAD_TOO_LARGE, ApiError(431, message, code="head_too_large"))

    def _refuse(self, reason: Closed, error: ApiError) -> None:
        """Answer with `error` once the responses before it are complete, and close."""
        self._others.note(reason)
        self._refusal = error
        self._deaf = True
        if not self._in_head and self.cycle is not None and self.cycle.more_body:
            self._drop_broken()
        answering = self._answering
        if answering is None or answering.response_complete:
            self._write_refusal()

    def _drop_broken(self) -> None:
        """The last request that was parsed is the wrong one: it has no other response."""
        if self.pipeline:
            self.pipeline.popleft()
        elif self.cycle is self._answering and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.close()
            self._answering = None
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _write_refusal(self) -> None:
        error = self._refusal
        if error is None or self.transport.is_closing():
            return
        body = json.dumps(error.body()).encode()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}".encode() for name, value in error.headers.items()]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._others.is_idle(self)
        self._arm(LINGER_S)

    # --- time ---------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Determine the event that the connection waits for, and its deadline."""
        stage = self._now()
        if stage is self._stage:
            return
        self._stage = stage
        limits = self._limits
        if stage is ConnectionStage.ANSWER:
            self._others.is_answered(self)
        elif stage is ConnectionStage.BODY:
            self._others.is_sending(self)
        else:
            self._others.is_idle(self)
        seconds = {
            ConnectionStage.NEW: limits.head_timeout_s,
            ConnectionStage.HEAD: limits.head_timeout_s,
            ConnectionStage.LEFTOVER: limits.body_timeout_s,
            ConnectionStage.IDLE: limits.idle_timeout_s,
        }
        self._arm(seconds.get(stage))

    def _now(self) -> ConnectionStage:
        answering = self._answering
        if answering is not None and not answering.response_complete:
            return ConnectionStage.BODY if answering.more_body else ConnectionStage.ANSWER
        if self._in_head:
            return ConnectionStage.HEAD
        if self.cycle is None:
            return ConnectionStage.NEW
        return ConnectionStage.LEFTOVER if self.cycle.more_body else ConnectionStage.IDLE

    def _arm(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._refusal is not None:
            self.transport.abort()
        elif self.transport.is_closing():
            self._close_for(Closed.NOT_READ)
        elif self._stage is ConnectionStage.HEAD:
            seconds = f"{self._limits.head_timeout_s:g} s"
            message = f"the request's first line and headers were not complete within {seconds}"
            self._refuse(Closed.HEAD_TIMEOUT, ApiError(408, message, code="head_timeout"))
        elif self._stage is ConnectionStage.IDLE:
            self.transport.abort()
        else:
            self._close_for(Closed.SILENT if self._stage is ConnectionStage.NEW else Closed.BODY_TIMEOUT)

    def _close_for(self, reason: Closed) -> None:
        self._others.note(reason)
        self.transport.abort()

    def _look(self, waited_s: float) -> None:
        """Whether a client that sends no more has closed the connection."""
        if self._stage is ConnectionStage.OVER or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # hang-ups and errors alone
        if poll.poll(0):
            self.transport.abort()
        else:
            waited_s = min(2 * waited_s, _LONGEST_LOOK_S)
            self.loop.call_later(waited_s, self._look, waited_s)
