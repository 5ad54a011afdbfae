"""The ASGI application: its middleware and its routes."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from slipstream.core.version import __version__
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import EngineStoppedError
from slipstream.serve import endpoints
from slipstream.serve.api import audio, errors, openapi
from slipstream.serve.api.chat import ChatAnswer
from slipstream.serve.api.completions import CompletionAnswer, echo_of
from slipstream.serve.api.constraints import Constraint, constraint_of
from slipstream.serve.api.errors import LOG_FIELDS, ApiError
from slipstream.serve.api.responses import routes as responses
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.sampling import check_unsupported, request_options, sampling_params, seeds_of
from slipstream.serve.api.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
)
from slipstream.serve.api.stream import IGNORED_FIELD, IGNORED_HEADER, LOSSY_HEADER, SEED_HEADER, Reply
from slipstream.serve.auth import KeyGuard, account_of, tenant_of
from slipstream.serve.config import ServeConfig
from slipstream.serve.dashboard import dashboard
from slipstream.serve.engines import ServedEngine
from slipstream.serve.job import Job
from slipstream.serve.limits import check_json, forget_body, read_body
from slipstream.serve.logs import ID_HEADER, RequestLog
from slipstream.serve.network.body_room import BodyRoom
from slipstream.serve.routes import HeadRequests, RouteTable
from slipstream.serve.service import Service
from slipstream.serve.tracing import TraceRequests, make_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

B = TypeVar("B", bound=Body)

LARGE_BYTES = 64 * 2**10
"""Bodies of this size are parsed off the event loop."""
STATE_TIMEOUT_S = 2.0
"""How long a scrape waits for a step to end; after that it shows the queue and the cache of the last read."""


def create_app(
    engine: AsyncEngine | ServedEngine,
    config: ServeConfig,
    model_name: str,
    traces: TracerProvider | None = None,
    inner: Seq[Middleware] = (),
) -> FastAPI:
    """The ASGI application around a running engine; its `state.service` is what the routes use.

    `model_name` is the model as it was given: a name, or the path that its name is derived from (`model_id`) unless
    the configuration says otherwise. The engine is closed when the application shuts down. `traces` receives the
    spans, instead of the endpoint in the configuration or the environment. `inner` is middleware between the API keys
    and the routes. Raises `ConfigError` for limits that the model cannot have.
    """
    traces = traces or make_provider(config.otlp_traces_endpoint, os.environ)
    service = Service(engine, config, model_name)
    routes = RouteTable()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        observer = asyncio.create_task(service.observer.run())
        yield
        observer.cancel()
        if service.learning is not None:
            await asyncio.to_thread(service.learning.close)
        await asyncio.to_thread(service.engine.close)
        if traces is not None:
            await asyncio.to_thread(traces.shutdown)  # sends what waits in its batch

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[*_middleware(service, routes, traces), *inner, Middleware(HeadRequests)],
    )
    app.state.service = service
    errors.install(app)
    openapi.install(app, config, service.model_name, routes)
    _add_generation(app, service)
    responses.add_routes(app, service, _reader(service, ResponseBody), _job)
    audio.add_routes(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    dashboard.add_routes(app, service)
    endpoints.add_to(app, service, routes)
    return app


def _middleware(service: Service, routes: RouteTable, traces: TracerProvider | None) -> list[Middleware]:
    """The middleware, the outermost first."""
    layers = [
        Middleware(RequestLog, metrics=service.metrics, routes=routes),
        Middleware(BodyRoom, max_body_bytes=service.config.max_body_bytes),
    ]
    if traces is not None:
        names = {"model_name": service.model_name, "method": service.method}
        layers.append(Middleware(TraceRequests, provider=traces, routes=routes, **names))
    if service.config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.config.cors_origins),
                allow_methods=["GET", "HEAD", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[ID_HEADER, SEED_HEADER, IGNORED_HEADER, LOSSY_HEADER],
            )
        )
    guard = Middleware(KeyGuard, keys=service.config.api_key, routes=routes)
    return [*layers, guard]


def _reader(service: Service, cls: type[B]) -> Callable[[Request], Awaitable[B]]:
    """A function that reads and checks a body of `cls`."""
    config = service.config

    async def read(request: Request) -> B:
        try:
            check_json(request)
            service.admission.check_open()
            service.admission.check_room(account=account_of(request.scope))
        except ApiError:
            await forget_body(request)
            raise
        raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        strict = config.strict_parameters
        if len(raw) < LARGE_BYTES:
            body = parse(cls, raw, strict)
        else:
            body = await asyncio.to_thread(parse, cls, raw, strict)
        if body.without_effect:
            request.scope[LOG_FIELDS][IGNORED_FIELD] = body.without_effect
        service.check_model(getattr(body, "model", None))
        return body

    return read


def _add_generation(app: FastAPI, service: Service) -> None:
    read_completion = _reader(service, CompletionBody)
    read_chat = _reader(service, ChatBody)
    check_grammar = service.engine.check_grammar

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_completion(request)
        check_unsupported(body)

        async def prepare() -> CompletionAnswer:
            tenant = tenant_of(request.scope, body.user)
            if body.echo and service.info.encoder_texts is not None:
                raise errors.invalid(
                    "an encoder-decoder's prompt is no part of its text; leave echo out", "echo"
                )
            if service.audio_reader is not None:
                raise errors.invalid(
                    "this model hears sounds; send them to /v1/audio/transcriptions", "prompt"
                )
            constraint = await constraint_of(body, service.tokens, check_grammar, tenant)
            prompts = await service.tokens.prompts(body.prompt)
            job = _job(service, request, body, prompts, "cmpl-", constraint)
            if body.echo:
                job = replace(job, echo=await echo_of(body, prompts, service.tokens))
            return CompletionAnswer(job, service)

        several = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
        return Reply(service, (len(body.prompt) if several else 1) * _num_each(body), prepare)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_chat(request)
        check_unsupported(body)

        async def prepare() -> ChatAnswer:
            tenant = tenant_of(request.scope, body.user)
            constraint = await constraint_of(body, service.tokens, check_grammar, tenant)
            tools = constraint.tools.tools if constraint and constraint.tools else None
            prompt = await service.tokens.chat(body.messages, body.chat_template_kwargs, tools)
            return ChatAnswer(_job(service, request, body, [prompt], "chatcmpl-", constraint), service)

        return Reply(service, _num_each(body), prepare)


def _num_each(body: GenerationBody) -> int:
    """Number of answers for each prompt; a bad `n` is refused later."""
    return max(body.n or 1, 1)


def _job(
    service: Service,
    request: Request,
    body: GenerationBody,
    prompts: list[list[int]],
    kind: str,
    constraint: Constraint | None,
) -> Job:
    """The job for the engine; raises `ApiError` 400 for parameters that it does not support."""
    fields = request.scope[LOG_FIELDS]
    if service.config.log_prompts:
        [fields["asked"]] = body.model_dump(include={"prompt", "messages"}, exclude_unset=True).values()
    options = body.stream_options
    seeds = seeds_of(body, len(prompts))
    return Job(
        id=f"{kind}{uuid.uuid4().hex}",
        prompts=prompts,
        params=sampling_params(
            body, [service.num_begun(prompt) for prompt in prompts], seeds[0], service.limits, constraint
        ),
        seeds=seeds,
        constraint=constraint,
        options=request_options(body, tenant_of(request.scope, body.user), service.methods),
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        log_fields=fields,
    )


def _add_tokens(app: FastAPI, service: Service) -> None:
    read_text = _reader(service, TokenizeBody)
    read_tokens = _reader(service, DetokenizeBody)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_text(request)
        if (body.prompt is None) == (body.messages is None):
            raise errors.invalid("give a prompt or messages, one of them", "prompt")
        async with service.tokenizing(account_of(request.scope)):
            if body.messages is not None:
                tokens = await service.tokens.encode_chat(body.messages, body.chat_template_kwargs)
            else:
                tokens = await service.tokens.encode(body.prompt or "", body.add_special_tokens is not False)
        limit = service.limits.max_model_len
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_tokens(request)
        async with service.tokenizing(account_of(request.scope)):
            return JSONResponse({"prompt": await service.tokens.decode(body.tokens)})


def _add_state(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "slipstream",
            "root": service.model_root,
            "parent": None,
            "max_model_len": service.limits.max_model_len,
            "speculation": service.speculation,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}")  # a name may have slashes, as those of the hub have
    async def retrieve_model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(card())

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs."""
        if service.engine.has_stopped:
            raise errors.unavailable("the engine has stopped")
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are accepted."""
        if not service.is_ready:
            raise errors.unavailable("the server takes no new requests")
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        with suppress(EngineStoppedError, TimeoutError):  # the counters are valid all the same
            async with asyncio.timeout(STATE_TIMEOUT_S):
                await service.observer.read()
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
