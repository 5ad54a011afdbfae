"""What the server's tests have in common."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.serve.lifecycle import DrainingServer
from slipstream.serve.network.listening import bind

MODEL = "pair"
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
QUESTION = "Write a SQL query. How many losses does the team from Hawthorn have?"
MESSAGES = [{"role": "user", "content": QUESTION}]

MakeApp = Callable[..., FastAPI]


def events(text: str) -> list[dict[str, Any]]:
    """The payloads of a stream, which must be framed exactly as OpenAI frames it."""
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    assert parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def counters(client: TestClient) -> dict[str, float]:
    """Sample name, with its labels but the model's, to value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            name = sample.name + ("" if not labels else json.dumps(labels, sort_keys=True))
            found[name] = sample.value
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll, and fail when it does not come true; long enough for a busy machine."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock can be set ahead: what waits for minutes is over at once, and no test needs a short limit, which a busy
    machine might pass too early."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def jump(self, seconds: float) -> None:
        """Set the clock ahead; called in another thread."""

        def ahead() -> None:
            self._ahead_s += seconds

        self.call_soon_threadsafe(ahead)


@contextmanager
def running(
    app: FastAPI, send_buffer: int | None = None, loop: JumpingLoop | None = None
) -> Iterator[tuple[str, DrainingServer]]:
    """A real server in a thread: its address, and itself. `send_buffer` bytes are what its sockets hold back; `loop` is
    the event loop that it runs in, if given."""
    bound = bind("127.0.0.1", 0)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = DrainingServer(app)
    if loop is not None:
        server.config.get_loop_factory = lambda: lambda: loop  # type: ignore[assignment,method-assign,return-value]
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()
