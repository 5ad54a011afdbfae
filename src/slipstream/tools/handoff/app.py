"""The watch's own small server: the dashboard, its metrics and alarms, beside the server that it watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from slipstream.core.version import __version__
from slipstream.serve.api import errors
from slipstream.serve.auth import KeyGuard
from slipstream.serve.dashboard.page import add_page
from slipstream.serve.network.body_room import BodyRoom
from slipstream.serve.routes import RouteTable
from slipstream.tools.handoff.exposition import WatchMetrics
from slipstream.tools.handoff.source import VllmSource

_BODY_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 64 * 2**10
_LAST_WRITES_S = 2

Job = Callable[[], Awaitable[None]]


def create_watch_app(source: VllmSource, jobs: Seq[Job], keys: Seq[str] = ()) -> FastAPI:
    """The ASGI application; `jobs` run as long as it does. With `keys` the dashboard's data need one of them."""
    routes = RouteTable()
    metrics = WatchMetrics(source)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(job()) for job in jobs]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    layers = [Middleware(BodyRoom, max_body_bytes=_MAX_BODY_BYTES)]
    guard = [Middleware(KeyGuard, keys=tuple(keys), routes=routes)] if keys else []
    app = FastAPI(
        title="Slipstream hand-off",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[*layers, *guard],
    )
    errors.install(app)
    add_page(app, source, _BODY_TIMEOUT_S)

    @app.get("/metrics")
    async def metrics_() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Response:
        """200 while the watched server can be read."""
        fault = source.watch.pause or source.watch.fault
        if fault is not None:
            raise errors.unavailable(f"the watched server is not well: {fault}")
        return JSONResponse({"status": "ok"})

    return app


class WatchServer(uvicorn.Server):
    """Ends on SIGTERM and SIGINT, and returns then, so that what the caller started can be stopped."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_LAST_WRITES_S,
                lifespan="on",
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; open pages are not waited for."""
        self.should_exit = True
