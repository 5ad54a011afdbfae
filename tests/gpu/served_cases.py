"""A server before an engine whose passes are captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from tests.gpu.captured_cases import options
from tests.kit.threaded_host import ThreadedHost
from tests.serve.serve_cases import DRAFT, MESSAGES, MODEL, counters, events


@contextmanager
def serving(device: str) -> Iterator[TestClient]:
    """A client of a server that drafts."""
    llm = LLM(speculative_config=DRAFT, max_num_seqs=4, max_model_len=512, **options(device))
    host = ThreadedHost(llm.engine)
    with TestClient(create_app(host.remote, ServeConfig(), MODEL)) as client:
        yield client
    host.close()
    assert llm.engine.integrity() == []


def check_answers(client: TestClient) -> None:
    """A streamed answer is the whole one, and the metrics have counted both."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200
    streamed = client.post("/v1/chat/completions", json=body | {"stream": True})
    choices = [choice for event in events(streamed.text) for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text
    assert text == whole.json()["choices"][0]["message"]["content"]
    found = counters(client)
    assert found["slipstream_generation_tokens_total"] == 24
