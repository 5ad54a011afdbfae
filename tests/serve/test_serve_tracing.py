"""Traces: one span a generation request, below the caller's, and nothing at all unless configured."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serve_cases import DRAFT, MESSAGES, MODEL, QUESTION
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine
from slipstream.errors import ConfigError
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.tracing import make_provider
from tests.kit.fake_http import QuietHandler, served

CHAT = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "task": "sql"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOWHERE = "http://127.0.0.1:9/v1/traces"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a proxy of the environment nor its own wishes for traces."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(drafting: LLM, exporter: InMemorySpanExporter) -> Any:
    """A server whose spans are kept."""
    drafting.reset_caches()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = AsyncEngine(engine=drafting.engine)
    with TestClient(create_app(engine, ServeConfig(), MODEL, traces=provider)) as client:
        yield client


def only(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, Any]]:
    [span] = exporter.get_finished_spans()
    return span, dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_is_a_span_in_the_conventions_names(
    traced: TestClient, exporter: InMemorySpanExporter, stream: bool
) -> None:
    response = traced.post("/v1/chat/completions", json=CHAT | {"stream": stream, "seed": 5})
    assert response.status_code == 200
    span, attributes = only(exporter)
    assert span.name == f"chat {MODEL}"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "slipstream"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.request.max_tokens"] == 12
    assert attributes["gen_ai.request.temperature"] == 0
    assert attributes["gen_ai.request.seed"] == 5
    assert attributes["gen_ai.request.choice.count"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.usage.output_tokens"] == 12
    assert attributes["gen_ai.usage.input_tokens"] > 12
    assert attributes["http.response.status_code"] == 200
    assert attributes["slipstream.stream"] is stream
    assert attributes["slipstream.task"] == "sql"
    assert attributes["slipstream.speculation.method"] == DRAFT["method"]
    assert 0 < attributes["slipstream.speculation.acceptance_rate"] <= 1
    drafted = attributes["slipstream.speculation.num_draft_tokens"]
    assert drafted >= attributes["slipstream.speculation.num_accepted_tokens"] > 0
    first_s = attributes["gen_ai.latency.time_to_first_token"]
    assert 0 <= attributes["gen_ai.latency.time_in_queue"] <= first_s <= attributes["gen_ai.latency.e2e"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert attributes["gen_ai.latency.e2e"] <= (span.end_time - span.start_time) / 1e9
    assert "error.type" not in attributes


def test_the_callers_trace_goes_on(traced: TestClient, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traced.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}, headers=headers)
    span, attributes = only(exporter)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == PARENT


def test_no_text_is_in_a_span(traced: TestClient, exporter: InMemorySpanExporter) -> None:
    body = CHAT | {"stop": ["zebra"], "user": "somebody"}
    answer = traced.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    told = only(exporter)[0].to_json()
    assert len(answer) > 10
    for text in (QUESTION, answer, "zebra", "somebody"):
        assert text not in told


def test_a_refusal_is_a_span_with_its_status(traced: TestClient, exporter: InMemorySpanExporter) -> None:
    assert traced.post("/v1/chat/completions", json=CHAT | {"temperature": -1}).status_code == 400
    span, attributes = only(exporter)
    assert attributes["http.response.status_code"] == 400
    assert attributes["error.type"] == "400"
    assert span.status.status_code is StatusCode.UNSET, "the client's fault is no fault of the server"


def test_a_fault_of_the_server_is_an_error(traced: TestClient, exporter: InMemorySpanExporter) -> None:
    traced.app.state.service.engine.close()  # type: ignore[attr-defined]
    assert traced.post("/v1/chat/completions", json=CHAT).status_code == 503
    span, attributes = only(exporter)
    assert attributes["error.type"] == "503"
    assert span.status.status_code is StatusCode.ERROR


def test_probes_and_scrapes_have_no_spans(traced: TestClient, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert traced.get(path).status_code == 200
    assert exporter.get_finished_spans() == ()


def test_spans_arrive_at_a_collector(drafting: LLM) -> None:
    """Over OTLP, sent at the latest when the server goes."""
    bodies: list[tuple[str, bytes]] = []

    class Collector(QuietHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send(200, b"")

    with served(Collector) as address:
        drafting.reset_caches()
        config = ServeConfig(otlp_traces_endpoint=f"{address}/v1/traces")
        with TestClient(create_app(AsyncEngine(engine=drafting.engine), config, MODEL)) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    [(path, body)] = bodies
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert ("service.name", "slipstream") in {
        (a.key, a.value.string_value) for a in resource.resource.attributes
    }
    assert resource.scope_spans[0].spans[0].name == f"chat {MODEL}"


NOBODY_ASKED: list[dict[str, str]] = [
    {},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_SDK_DISABLED": "true"},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_TRACES_EXPORTER": "none"},
]


@pytest.mark.parametrize("environment", NOBODY_ASKED)
def test_off_unless_configured(environment: dict[str, str]) -> None:
    assert make_provider(None, environment) is None


def test_the_variables_and_the_flag_turn_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, environment in ((NOWHERE, {}), (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NOWHERE})):
        provider = make_provider(endpoint, environment)
        assert provider is not None
        assert provider.resource.attributes["service.name"] == "slipstream"
        provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = make_provider(NOWHERE, {"OTEL_SERVICE_NAME": "mine"})
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"must be http/protobuf or grpc, got 'smoke'"):
        make_provider(NOWHERE, {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"})
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"install slipstream-llm\[otel\]"):
        make_provider(NOWHERE, {})
    assert make_provider(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE}) is None
    assert "install slipstream-llm[otel]" in caplog.text


def test_nothing_is_imported_when_off() -> None:
    code = (
        "import sys, slipstream.serve.app; from slipstream.serve.tracing import make_provider; "
        "assert make_provider(None, {}) is None; "
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
