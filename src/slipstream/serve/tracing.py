"""OpenTelemetry traces, one span a generation request, in the names of the GenAI semantic conventions.

Off unless an endpoint is configured: `--otlp-traces-endpoint`, or the standard variables
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT`. Off, nothing of OpenTelemetry is imported
and no middleware is added. The `OTEL_*` variables set the rest: sampler, resource, propagators, headers, batches.
No text of a request or answer is in a span.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.version import __version__
from slipstream.errors import ConfigError
from slipstream.serve.api.answer import ApiAnswer
from slipstream.serve.api.errors import LOG_FIELDS
from slipstream.serve.api.stream import ANSWER
from slipstream.serve.routes import RouteTable

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_INSTALL = "install slipstream-llm[otel]"


def make_provider(endpoint: str | None, environment: Mapping[str, str]) -> TracerProvider | None:
    """The provider of spans; None where traces are off.

    `endpoint` is used as it is (over HTTP with its `/v1/traces`); without one the variables decide. Raises
    `ConfigError` when the packages that `endpoint` needs are missing; for the variables alone, which may be meant
    for others, that is a warning.
    """
    if endpoint is None and not _asked_by(environment):
        return None
    try:
        return _provider(endpoint, environment)
    except ImportError as error:
        message = f"traces need packages that are not installed ({error.name}); {_INSTALL}"
        if endpoint is not None:
            raise ConfigError(f"serve otlp_traces_endpoint: {message}") from None
        logger.warning(message)
        return None


def _asked_by(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    return exporter == "otlp" and any(environment.get(name) for name in _ENDPOINTS)


def _provider(endpoint: str | None, environment: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = environment.get("OTEL_SERVICE_NAME") or SERVICE_NAME in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {SERVICE_NAME: "slipstream"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, environment)))
    return provider


def _exporter(endpoint: str | None, environment: Mapping[str, str]) -> Any:
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=endpoint)
    raise ConfigError(f"{_PROTOCOLS[0]} must be http/protobuf or grpc, got {protocol!r}")


class TraceRequests:
    """Middleware: a span from a request's arrival to its last byte, below the caller's `traceparent`.

    Requests of routes without an `operation` have none.
    """

    def __init__(
        self, app: ASGIApp, provider: TracerProvider, routes: RouteTable, model_name: str, method: str
    ) -> None:
        self._app = app
        self._routes = routes
        self._tracer = provider.get_tracer("slipstream", __version__)
        self._model_name = model_name
        self._method = method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._routes.find(scope).operation if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "slipstream",
                "gen_ai.request.model": self._model_name,
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "slipstream.speculation.method": self._method,
            },
        )
        status: int | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            if span.is_recording():
                _finish(span, scope, status)
            span.end()


def _finish(span: Span, scope: Scope, status: int | None) -> None:
    """Set the attributes that are known at the end of a request."""
    from opentelemetry.trace import StatusCode

    fields: dict[str, Any] = scope[LOG_FIELDS]
    answer: ApiAnswer | None = scope.get(ANSWER)
    if answer is not None:
        span.set_attributes(dict(_of_answer(answer)))
    if status is not None:
        span.set_attribute("http.response.status_code", status)
    if status is None or fields.get("client_left"):
        span.set_attribute("error.type", "client_left")
    elif status >= 400:
        span.set_attribute("error.type", str(status))
    elif "error" in fields:  # a stream that failed after it had begun
        span.set_attribute("error.type", "stream_broken_off")
    if "error" in fields or (status is not None and status >= 500):
        span.set_status(StatusCode.ERROR)


def _of_answer(answer: ApiAnswer) -> Iterator[tuple[str, Any]]:
    """Attributes of the request and its cost. Times are in seconds."""
    job, params = answer.job, answer.job.params
    yield "gen_ai.response.id", job.id
    yield "gen_ai.request.choice.count", job.num_answers
    for name in ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        yield f"gen_ai.request.{name}", getattr(params, name)
    if len(set(job.seeds)) == 1:  # the attribute holds one number
        yield "gen_ai.request.seed", params.seed
    yield "gen_ai.usage.input_tokens", sum(map(len, job.prompts))
    yield "gen_ai.usage.output_tokens", answer.num_output_tokens
    yield "slipstream.stream", job.stream
    yield "slipstream.lossy", answer.is_lossy
    if job.options.task:
        yield "slipstream.task", job.options.task
    outputs = [completion for output in answer.outputs for completion in output.outputs]
    if outputs:
        yield "gen_ai.response.finish_reasons", [str(completion.finish_reason) for completion in outputs]
        yield from _of_metrics(RequestMetrics.merged([completion.metrics for completion in outputs]))


def _of_metrics(metrics: RequestMetrics) -> Iterator[tuple[str, Any]]:
    """`gen_ai.latency.*` are vLLM's names; the conventions have none for them."""
    yield "gen_ai.usage.cache_read.input_tokens", metrics.num_cached_tokens
    yield "gen_ai.latency.time_in_queue", metrics.queue_s
    yield "gen_ai.latency.time_to_first_token", metrics.time_to_first_token_s
    yield "gen_ai.latency.e2e", metrics.total_s
    yield "slipstream.latency.draft", metrics.draft_s
    yield "slipstream.latency.verify", metrics.verify_s
    yield "slipstream.num_target_passes", metrics.num_steps
    yield "slipstream.num_preemptions", metrics.num_preemptions
    yield "slipstream.speculation.num_draft_tokens", metrics.num_draft_tokens
    yield "slipstream.speculation.num_accepted_tokens", metrics.num_accepted_tokens
    if metrics.num_draft_tokens:
        yield "slipstream.speculation.acceptance_rate", metrics.acceptance_rate
    yield "slipstream.speculation.acceptance_length", metrics.acceptance_length
    if metrics.lossy:
        yield "slipstream.reasoning.num_drafted_steps", metrics.num_drafted_steps
        yield "slipstream.reasoning.num_kept_steps", metrics.num_kept_steps
        yield "slipstream.reasoning.num_lossy_tokens", metrics.num_lossy_tokens
