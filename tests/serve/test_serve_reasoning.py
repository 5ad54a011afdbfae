"""Step-level speculation over HTTP: refused unless the server allows it, and said to be lossy wherever it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serve_cases import DRAFT, MESSAGES, MODEL
from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from tests.kit.threaded_host import ThreadedHost

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
STEPS = {"judge": "logprob", "threshold": -50, "protect_first_steps": 0}
HEADER = "x-slipstream-lossy"
SPANS = InMemorySpanExporter()


@pytest.fixture(scope="module")
def lossy() -> Iterator[TestClient]:
    """A server that allows it."""
    spec = DRAFT | {"reasoning": {"model": EMBEDDED_DRAFT, "separator": " "}}
    llm = LLM(speculative_config=spec, allow_lossy=True, kv_cache_bytes=60 * 2**20, max_num_seqs=4)
    host = ThreadedHost(llm.engine)
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(SPANS))
    config = ServeConfig(per_request_metrics=True)
    with TestClient(create_app(host.remote, config, MODEL, traces=traces)) as client:
        yield client
    host.close()
    assert llm.engine.integrity() == []


def test_a_lossy_answer_says_so_everywhere(lossy: TestClient) -> None:
    before = lossy.get("/metrics").text
    response = lossy.post(PATH, json=BODY | {"speculation": {"reasoning": STEPS}})
    answer = response.json()
    assert response.headers[HEADER] == "step-reasoning"
    assert answer["lossy"] is answer["usage"]["lossy"] is answer["metrics"]["lossy"] is True
    details = answer["usage"]["completion_tokens_details"]
    assert details["kept_steps"] > 1
    assert answer["system_fingerprint"].endswith("-lossy-step-reasoning")
    [steps] = answer["reasoning_steps"]
    assert sum(step["verdict"] == "kept" for step in steps) == details["kept_steps"]
    kept = next(step for step in steps if step["verdict"] == "kept")
    assert {"step", "author", "tokens", "drafted", "score", "entropy"} <= kept.keys()
    assert kept["author"] == "draft"
    assert "x-slipstream-seed" not in response.headers, "no seed repeats it"
    after = lossy.get("/metrics").text
    for name in ("lossy_requests", "reasoning_drafted_steps", "reasoning_kept_steps", "lossy_tokens"):
        assert value(after, name) > value(before, name)
    [latest, *_] = lossy.get("/dashboard/data").json()["recent"]
    assert latest["lossy"]
    assert latest["num_lossy_tokens"] == details["lossy_tokens"]


def value(metrics: str, name: str) -> float:
    [line] = [line for line in metrics.splitlines() if line.startswith(f"slipstream_{name}_total{{")]
    return float(line.rsplit(" ", 1)[1])


def test_other_answers_do_not(lossy: TestClient, shared: TestClient) -> None:
    response = lossy.post(PATH, json=BODY)
    answer = response.json()
    assert HEADER not in response.headers
    assert "lossy" not in answer
    assert "lossy" not in answer["usage"]
    assert answer["metrics"]["lossy"] is False
    assert answer["system_fingerprint"] == shared.post(PATH, json=BODY).json()["system_fingerprint"]
    assert "lossy" not in answer["system_fingerprint"]
    assert answer["choices"] == shared.post(PATH, json=BODY).json()["choices"]
    [model] = lossy.get("/v1/models").json()["data"]
    assert model["speculation"]["lossy"] is True
    [exact] = shared.get("/v1/models").json()["data"]
    assert exact["speculation"]["lossy"] is False


def test_a_trace_says_whether_an_answer_is_lossy(lossy: TestClient) -> None:
    SPANS.clear()
    lossy.post(PATH, json=BODY | {"speculation": {"reasoning": STEPS}})
    lossy.post(PATH, json=BODY)
    on, off = (dict(span.attributes or {}) for span in SPANS.get_finished_spans())
    assert (on["slipstream.lossy"], off["slipstream.lossy"]) == (True, False)
    assert on["slipstream.reasoning.num_kept_steps"] > 1  # type: ignore[operator]
    assert on["slipstream.reasoning.num_lossy_tokens"] > 1  # type: ignore[operator]
    assert not any(name.startswith("slipstream.reasoning") for name in off)


def test_a_response_says_so_too(lossy: TestClient) -> None:
    body = {"input": "Once upon a time", "temperature": 0, "max_output_tokens": 40}
    answer = lossy.post("/v1/responses", json=body | {"speculation": {"reasoning": STEPS}}).json()
    assert answer["lossy"] is answer["usage"]["lossy"] is True
    [steps] = answer["reasoning_steps"]
    assert answer["usage"]["output_tokens_details"]["kept_steps"] == sum(
        step["verdict"] == "kept" for step in steps
    )
    assert "lossy" not in lossy.post("/v1/responses", json=body).json()


def test_a_stream_says_it_at_its_end(lossy: TestClient) -> None:
    body = BODY | {"speculation": {"reasoning": True}, "stream": True}
    response = lossy.post(PATH, json=body)
    assert response.headers[HEADER] == "step-reasoning"
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "lossy" not in events[0]
    assert all(event["system_fingerprint"].endswith("-lossy-step-reasoning") for event in events)
    assert events[-1]["lossy"] is True
    assert len(events[-1]["reasoning_steps"]) == 1
    counted = lossy.post(PATH, json=body | {"stream_options": {"include_usage": True}}).text.split("\n\n")
    last = json.loads(counted[-3].removeprefix("data: "))
    assert last["usage"]["lossy"] is last["lossy"] is True


@pytest.mark.parametrize(
    ("reasoning", "said"),
    [
        ({"judge": "vibes"}, "reasoning judge must be 'score' or 'logprob'"),
        ({"thresold": 3}, "did you mean 'threshold'"),
        ({"draft": "other"}, "reasoning draft must be 'draft' here"),
    ],
)
def test_bad_settings_are_refused(lossy: TestClient, reasoning: dict[str, Any], said: str) -> None:
    response = lossy.post(PATH, json=BODY | {"speculation": {"reasoning": reasoning}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["param"] == "speculation.reasoning"


def test_a_server_that_does_not_allow_it_refuses(shared: TestClient) -> None:
    for stream in (False, True):
        body = BODY | {"speculation": {"reasoning": True}, "stream": stream}
        response = shared.post(PATH, json=body)
        assert response.status_code == 400
        assert "start it with allow_lossy (--allow-lossy)" in response.json()["error"]["message"]
        assert HEADER not in response.headers
    off = shared.post(PATH, json=BODY | {"speculation": {"reasoning": False}})
    assert off.status_code == 200
