"""The HTTP front of a deployment: the server of `slipstream serve`, with the replicas as its engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.deploy.fleet_metrics import FleetCollector
from slipstream.deploy.idempotency import Idempotency
from slipstream.deploy.relay import Discover, Relay
from slipstream.deploy.replicas_page import PAGE
from slipstream.deploy.router import Router
from slipstream.deploy.served import CLAIMS, RequestClaims, ServedFleet
from slipstream.deploy.settings import DeploySettings
from slipstream.serve import endpoints
from slipstream.serve.api.errors import ApiError
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

TIMEOUT_HEADER = "x-slipstream-timeout-s"
"""A request's own deadline, in seconds from now."""
MOVED_HEADER = b"x-slipstream-moved"
"""How often an answer went on at another replica; behind it `unlike` where that one's arithmetic is another."""

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of `Directory` by its name."""


class ClaimHeaders:
    """ASGI middleware: reads a request's deadline, and says in the response where an answer crossed to other
    arithmetic. A stream says so in a comment before its end, since its headers have gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claims = RequestClaims()
        given = Headers(scope=scope).get(TIMEOUT_HEADER)
        if given is not None:
            try:
                claims.timeout_s = float(given)
                if not 0 < claims.timeout_s < float("inf"):
                    raise ValueError
            except ValueError:
                message = f"X-Slipstream-Timeout-S must be seconds above 0, got {given[:40]!r}"
                error = ApiError(400, message, code="invalid_value")
                await error.response()(scope, receive, send)
                return
        token = CLAIMS.set(claims)

        async def say(message: Message) -> None:
            if claims.num_moves and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (MOVED_HEADER, said(claims))]}
            elif claims.crossed_unlike and message["type"] == "http.response.body":
                body = message.get("body", b"")
                if body.endswith(b"\n\n") and not message.get("more_body", False):
                    message = {**message, "body": b": moved " + said(claims) + b"\n\n" + body}
            await send(message)

        try:
            await self._app(scope, receive, say)
        finally:
            CLAIMS.reset(token)


def _inner(config: ServeConfig) -> list[Middleware]:
    """What a deployment has between the API keys and the routes."""
    recorded = Middleware(
        Idempotency, max_body_bytes=config.max_body_bytes, body_timeout_s=config.body_timeout_s
    )
    return [recorded, Middleware(ClaimHeaders)]


def said(claims: RequestClaims) -> bytes:
    """The value of the header."""
    return f"{claims.num_moves}{'; unlike' if claims.crossed_unlike else ''}".encode()


class FrontApp:
    """An ASGI application that begins to serve when the first replica has said what it is."""

    def __init__(self, settings: DeploySettings, ask: Ask, model_name: str | None = None) -> None:
        self._settings = settings
        self._ask = ask
        self._model_name = model_name or settings.served_name
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the application's life from its start to its end."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                self._app = await self._start(stack)
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, stack: contextlib.AsyncExitStack) -> ASGIApp:
        relay = Relay(Router(self._settings.router_config()), await self._ask("secret"))
        running = asyncio.create_task(relay.run(self._discover()))
        stack.push_async_callback(_end, running)
        # During an update there are replicas of the settings before: their bounds and defaults are not the new ones.
        while (about := relay.about_generation(self._settings.generation)) is None:
            if running.done():
                await running
            await asyncio.sleep(0.05)
        fleet = await asyncio.to_thread(_fleet, self._settings, relay, about)
        endpoints.register(
            "slipstream.replicas", lambda router, context: add_replicas(router, context, fleet)
        )
        try:
            config = ServeConfig(**{"max_waiting": 10**6, **self._settings.serve})
            app = create_app(fleet, config, self._model_name, inner=_inner(config))
        finally:
            endpoints.unregister("slipstream.replicas")
        app.state.service.metrics.register(FleetCollector(relay.router))
        await stack.enter_async_context(app.router.lifespan_context(app))
        return app

    def _discover(self) -> Discover:
        async def addresses() -> list[tuple[str, int]]:
            return [(str(host), int(port)) for host, port in await self._ask("addresses")]

        return addresses


def add_replicas(router: APIRouter, context: endpoints.EndpointContext, fleet: ServedFleet) -> None:
    """The page of the replicas and its data."""

    @router.get("/replicas", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @router.get("/replicas/data")
    async def replicas() -> dict[str, Any]:
        """The replicas behind this front, and what its router has done."""
        relay = fleet.relay
        counts = relay.router.counts
        return {
            "replicas": fleet.replicas(),
            "queued": relay.router.queue.num_answers,
            "under_way": relay.router.num_under_way,
            "counts": {name: getattr(counts, name) for name in counts.__slots__},
        }

    context.set_policy("/replicas", needs_key=False, is_traced=False)
    context.set_policy("/replicas/data", is_traced=False)


def _fleet(settings: DeploySettings, relay: Relay, about: Mapping[str, Any]) -> ServedFleet:
    from slipstream.models.tokenizer import load_tokenizer

    engine = settings.engine
    path = engine.get("tokenizer") or about["model"]
    trusts = bool(engine.get("trust_remote_code", False))
    tokenizer = load_tokenizer(path, revision=engine.get("revision"), trust_remote_code=trusts)
    return ServedFleet(relay, tokenizer, dict(about))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
