"""Endpoints of other packages, found by their entry points:

    [project.entry-points."slipstream.endpoints"]
    score = "my_package.module:add_endpoints"

Code adds them with `register`. The function is called once for each application, as `add_endpoints(router, context)`.
`router` is a FastAPI `APIRouter`; `context` is an `EndpointContext`. What holds for the server's own routes holds for
those that it adds: API keys, bounds on bodies, the timeout of requests (until the response begins), errors in OpenAI's
shape, the access log, traces and the OpenAPI document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from operator import itemgetter

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError
from slipstream.serve.auth import tenant_of
from slipstream.serve.limits import check_json, read_body
from slipstream.serve.routes import RouteTable, ServedRoute
from slipstream.serve.service import Service

GROUP = "slipstream.endpoints"
_WITHOUT_EFFECT = {"GET", "HEAD", "OPTIONS"}
"""Methods that are answered during a drain too."""


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What an endpoint is given of the server."""

    engine: EngineClient
    """Where requests go: an `AsyncEngine`, or the same in front of an engine in a process of its own."""
    model_name: str
    """How clients name the model."""
    _service: Service = field(repr=False)
    _policies: dict[str, dict[str, bool]] = field(default_factory=dict, repr=False)

    def set_policy(self, path: str, *, needs_key: bool = True, is_traced: bool = True) -> None:
        """Change what holds for the routes of `path`: without a call they need a key and each request has a span."""
        self._policies[path] = {"needs_key": needs_key, "is_traced": is_traced}

    def tenant(self, request: Request, user: str | None = None) -> str:
        """Return a value for `RequestOptions.tenant`: whose API key came with the request, and within it the `user`."""
        return tenant_of(request.scope, user)

    def admit(self, num_answers: int) -> AbstractContextManager[None]:
        """Count answers as under way while the context lasts: a server that drains waits for them.

        Raises an error that is answered with status 429 where too many are waiting, and 503 during a drain.
        """
        return self._service.admission.admit(num_answers)


AddEndpoints = Callable[[APIRouter, EndpointContext], None]


_registered: dict[str, AddEndpoints] = {}


def register(name: str, add_endpoints: AddEndpoints) -> None:
    """Add endpoints to the applications that this process makes from now on.

    Raises `ConfigError` where other endpoints have the name.
    """
    if _registered.get(name, add_endpoints) is not add_endpoints:
        raise ConfigError(f"endpoint {name!r} exists already; register it under another name")
    _registered[name] = add_endpoints


def unregister(name: str) -> None:
    """Take back what `register` added; a name that was not registered is ignored."""
    _registered.pop(name, None)


def add_to(app: FastAPI, service: Service, routes: RouteTable) -> None:
    """Add the registered endpoints and those of all installed packages to `app` and to `routes`.

    They come behind those that are there, by name. Raises `ConfigError` for a function that cannot be imported or
    fails, for a route that exists already, for one that is not an HTTP route of the given router, and for a policy
    without a route.
    """
    found: list[tuple[str, Callable[[], AddEndpoints]]] = [
        *((entry.name, entry.load) for entry in entry_points(group=GROUP)),
        *((name, partial(_registered.__getitem__, name)) for name in _registered),
    ]
    for name, load in sorted(found, key=itemgetter(0)):
        context = EndpointContext(service.engine, service.model_name, service)
        bounded = _bounded_route(service)
        router = APIRouter(route_class=bounded)
        try:
            load()(router, context)
        except Exception as error:
            raise ConfigError(
                f"endpoint {name!r} cannot be added: {type(error).__name__}: {error}"
            ) from error
        paths: set[str] = set()
        for route in router.routes:
            if not isinstance(route, bounded):  # bodies of other routes have no bounds
                raise ConfigError(
                    f"endpoint {name!r} adds a {type(route).__name__}; only HTTP routes can be added, and each to the "
                    "router that the function is given"
                )
            _add_to_table(route, name, context, routes)
            paths.add(route.path)
        if unknown := context._policies.keys() - paths:
            raise ConfigError(f"endpoint {name!r} sets a policy for {min(unknown)!r}, where it adds no route")
        app.include_router(router)


def _add_to_table(route: APIRoute, name: str, context: EndpointContext, routes: RouteTable) -> None:
    policy = {"needs_key": True, "is_traced": True, **context._policies.get(route.path, {})}
    for method in sorted(route.methods or ()):
        try:
            routes.add(
                ServedRoute(
                    method,
                    route.path,
                    needs_key=policy["needs_key"],
                    is_api=True,
                    operation=route.name if policy["is_traced"] else None,
                    is_documented=route.include_in_schema,
                )
            )
        except ValueError as error:
            raise ConfigError(f"endpoint {name!r}: {error}") from None


def _bounded_route(service: Service) -> type[APIRoute]:
    """A route whose body is read within the server's bounds before FastAPI parses it, and whose response begins within
    the server's timeout of requests."""
    config = service.config

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                if self.body_field is not None:
                    check_json(request)
                if request.method not in _WITHOUT_EFFECT:
                    service.admission.check_open()
                # Any method may have a body. `Request.body` would read it without bounds.
                request._body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
                async with service.until(asyncio.get_running_loop().time() + config.request_timeout_s):
                    return await handle(request)

            return bounded

    return BoundedRoute
