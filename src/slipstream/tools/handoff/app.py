"""The watch's own small server: the dashboard, its metrics and alarms, next to the server that it watches.

Its `/metrics` are vLLM's under Slipstream's names, and what the watch adds, for the boards of `deploy/`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from slipstream.core.version import __version__
from slipstream.serve.api import errors
from slipstream.serve.auth import KeyGuard
from slipstream.serve.dashboard.page import add_page
from slipstream.serve.metrics.control_metrics import ControlMetrics
from slipstream.serve.metrics.vllm_metrics import AS_VLLM, PREFIX, VLLM_PREFIX
from slipstream.serve.network.body_room import BodyRoom
from slipstream.serve.routes import RouteTable
from slipstream.tools.handoff.source import VllmSource


class WatchMetrics(Collector):
    """All metrics of one watch."""

    def __init__(self, source: VllmSource) -> None:
        self._source = source
        self._control = ControlMetrics(source.watch.history, str)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        watch = self._source.watch
        labels = {"model_name": watch.server.model}
        reachable = GaugeMetricFamily("server_reachable", "1 while the watched server's metrics can be read.")
        reachable.add_metric([], float(watch.fault is None and watch.pause is None))
        self._control.report = self._source.report()
        for family in (reachable, *self._control.collect()):
            yield _renamed(family, "", PREFIX, labels)
        for family in watch.registry.collect():
            yield _renamed(family, PREFIX, PREFIX, labels)
        if watch.history.last is not None:
            for family in watch.history.last.families:
                if family.name.removeprefix(VLLM_PREFIX) in AS_VLLM:
                    yield _renamed(family, VLLM_PREFIX, PREFIX, {})


def _renamed(family: Metric, old: str, new: str, labels: dict[str, str]) -> Metric:
    """The family with another prefix and further labels."""
    renamed = copy.copy(family)
    renamed.name = new + family.name.removeprefix(old)
    renamed.samples = [
        Sample(
            new + sample.name.removeprefix(old),
            {**labels, **sample.labels},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return renamed


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
