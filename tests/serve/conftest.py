"""Engines and servers around the embedded pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from serve_cases import DRAFT, MESSAGES, MODEL, MakeApp
from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.text.prompts import encode_chat
from tests.kit.threaded_host import ThreadedHost


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
    return LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20, max_num_seqs=4)


@pytest.fixture
def make_app(drafting: LLM) -> Iterator[MakeApp]:
    """Applications around `drafting`, one after the other; the engine must be idle and whole when each ends."""
    made: list[ThreadedHost] = []

    def make(model: str = MODEL, **config: Any) -> FastAPI:
        drafting.reset_caches()
        made.append(ThreadedHost(drafting.engine, has_keys="api_key" in config))
        return create_app(made[-1].remote, ServeConfig(**config), model)

    yield make
    for host in made:
        host.close()
        assert not drafting.engine.has_unfinished
        assert drafting.engine.integrity() == []


@pytest.fixture
def client(make_app: MakeApp) -> Iterator[TestClient]:
    with TestClient(make_app()) as client:
        yield client


@pytest.fixture(scope="session")
def shared() -> Iterator[TestClient]:
    """A server with an engine of its own, for tests that leave it as it was."""
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20, max_num_seqs=4)
    host = ThreadedHost(llm.engine, stream_interval_s=ServeConfig().stream_interval_s)
    with TestClient(create_app(host.remote, ServeConfig(), MODEL)) as client:
        yield client
    host.close()
    assert llm.engine.integrity() == []
