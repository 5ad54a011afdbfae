"""One table of the server's routes: what its layers (keys, log, traces, the OpenAPI document) need to know of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEYED_ROOT = "/v1"
"""Everything below it needs a key, also what no route serves."""


@dataclass(frozen=True, slots=True)
class ServedRoute:
    """A method and a path, as FastAPI spells it: "/v1/responses/{response_id}"."""

    method: str
    path: str
    needs_key: bool = False
    """Where the server has keys."""
    is_api: bool = False
    """Clients use it: its responses are counted, and logged at level INFO. Probes and scrapes are logged at DEBUG."""
    operation: str | None = None
    """What a request's span is called, as in the GenAI semantic conventions; None has no span."""
    is_documented: bool = True
    """It is in the OpenAPI document."""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The router's own expression: a path that it accepts and this one does not would pass the key guard.
        object.__setattr__(self, "pattern", compile_path(self.path)[0])

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _api(method: str, path: str, operation: str | None = None) -> ServedRoute:
    return ServedRoute(method, path, needs_key=True, is_api=True, operation=operation)


BUILT_IN = (
    _api("POST", "/v1/completions", "text_completion"),
    _api("POST", "/v1/chat/completions", "chat"),
    _api("POST", "/v1/responses", "chat"),
    _api("POST", "/v1/audio/transcriptions", "transcribe"),
    _api("POST", "/v1/audio/translations", "translate"),
    _api("GET", "/v1/responses/{response_id}"),
    _api("DELETE", "/v1/responses/{response_id}"),
    _api("POST", "/tokenize"),
    _api("POST", "/detokenize"),
    _api("GET", "/v1/models"),
    _api("GET", "/v1/models/{model:path}"),
    ServedRoute("GET", "/health"),
    ServedRoute("GET", "/ready"),
    ServedRoute("GET", "/version"),
    ServedRoute("GET", "/metrics"),
    ServedRoute("GET", "/openapi.json", is_documented=False),
    ServedRoute("GET", "/", is_documented=False),
    ServedRoute("GET", "/dashboard", is_documented=False),
    ServedRoute("GET", "/dashboard/data", needs_key=True, is_documented=False),
    ServedRoute("POST", "/dashboard/acknowledge", needs_key=True, is_documented=False),
)


class RouteTable:
    """The routes of one application, in the order in which its router tries them."""

    def __init__(self, routes: Iterable[ServedRoute] = BUILT_IN) -> None:
        self._routes = list(routes)

    def __iter__(self) -> Iterator[ServedRoute]:
        return iter(self._routes)

    def add(self, route: ServedRoute) -> None:
        """Add a route behind all others. Raises `ValueError` where its method and path are taken."""
        if any((known.method, known.path) == (route.method, route.path) for known in self._routes):
            raise ValueError(f"{route} exists already")
        self._routes.append(route)

    def find(self, scope: Scope) -> ServedRoute:
        """The route of an HTTP request.

        HEAD is GET. Where no route takes the method it is the first that has the path, and for an unknown path a route
        that stands for it.
        """
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = [route for route in self._routes if route.pattern.match(path)]
        if not found:
            is_keyed = path == KEYED_ROOT or path.startswith(KEYED_ROOT + "/")
            return ServedRoute(method, "/v1" if is_keyed else "/", needs_key=is_keyed, is_api=is_keyed)
        return next((route for route in found if route.method == method), found[0])


class HeadRequests:
    """Middleware: every path that takes GET takes HEAD too, whose answer is GET's without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)
