"""One server for most tests: the embedded pair with a drafter, and a plain engine to compare with."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.engine.inputs import encode_chat
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import Server

MODEL = "pair"
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
QUESTION = "Write a SQL query. How many losses does the team from Hawthorn have?"
MESSAGES = [{"role": "user", "content": QUESTION}]

MakeApp = Callable[..., FastAPI]


@pytest.fixture(scope="session")
def plain() -> LLM:
    """Speculation off: what every text must be equal to."""
    return LLM(kv_cache_bytes=32 * 2**20)


@pytest.fixture(scope="session")
def chat_prompt(plain: LLM) -> list[int]:
    return encode_chat(plain.engine.tokenizer, MESSAGES)


@pytest.fixture(scope="session")
def drafting() -> LLM:
    """The engine behind the servers. Nothing may be left in it."""
    return LLM(speculative_config=DRAFT, kv_cache_bytes=32 * 2**20, max_num_seqs=4)


@pytest.fixture
def make_app(drafting: LLM) -> Iterator[MakeApp]:
    """Applications around `drafting`, one after the other; the engine must be idle and whole when each ends."""
    made: list[AsyncEngine] = []

    def make(**config: Any) -> FastAPI:
        drafting.reset_caches()
        made.append(AsyncEngine(engine=drafting.engine))
        return create_app(made[-1], ServeConfig(**config), MODEL)

    yield make
    for engine in made:
        engine.close()
        assert not engine.engine.has_unfinished
        assert engine.engine.integrity() == []


@pytest.fixture
def client(make_app: MakeApp) -> Iterator[TestClient]:
    with TestClient(make_app()) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    """The payloads of a stream, which must be framed exactly as OpenAI frames it."""
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    assert parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def counters(client: TestClient) -> dict[str, float]:
    """Sample name, with its labels but the model's, to value."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            name = sample.name + ("" if not labels else json.dumps(labels, sort_keys=True))
            found[name] = sample.value
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll, and fail when it does not come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextmanager
def running(app: FastAPI) -> Iterator[tuple[str, Server]]:
    """A real server in a thread: its address, and itself."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
