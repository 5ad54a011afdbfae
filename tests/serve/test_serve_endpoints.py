"""An endpoint of another package: its entry point adds it, and what holds for the server's own routes holds for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from serve_cases import MODEL, MakeApp
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine, RequestOptions, SamplingParams
from slipstream.errors import ConfigError
from slipstream.serve import endpoints
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.endpoints import EndpointContext
from slipstream.serve.routes import RouteTable

KEY = {"Authorization": "Bearer k"}


class FirstTokenBody(BaseModel):
    """What the example endpoint takes."""

    text: str
    user: str | None = None


def add_example(router: APIRouter, context: EndpointContext) -> None:
    """Two endpoints as another package would write them."""

    @router.post("/first-token")
    async def first_token(body: FirstTokenBody, request: Request) -> dict[str, Any]:
        """The token that follows a text."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        options = RequestOptions(tenant=context.tenant(request, body.user))
        with context.admit(1):
            output = await context.engine.generate(body.text, params, options=options)
        return {"model": context.model_name, "token_id": output.outputs[0].token_ids[0]}

    @router.get("/queue/{name}")
    async def queue(name: str) -> Response:
        stats = await context.engine.stats()
        if name not in ("running", "waiting"):
            raise RuntimeError("a fault of the endpoint's own")
        return JSONResponse({name: getattr(stats, f"num_{name}")})

    context.set_policy("/queue/{name}", needs_key=False, is_traced=False)


def add_taken(router: APIRouter, context: EndpointContext) -> None:
    """A route of the server's own."""
    router.add_api_route("/health", lambda: {}, methods=["GET"])


def add_web_socket(router: APIRouter, context: EndpointContext) -> None:
    """What is no HTTP route."""

    @router.websocket("/talk")
    async def talk(socket: Any) -> None: ...


def add_sizes(router: APIRouter, context: EndpointContext) -> None:
    """A body where none is usual, as text or as a model."""

    @router.get("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @router.delete("/text")
    async def text(body: FirstTokenBody) -> int:
        return len(body.text)


def add_unbounded(router: APIRouter, context: EndpointContext) -> None:
    """A route of another router, which does not bound its bodies."""
    router.routes.append(APIRoute("/other", lambda: {}))


def add_misspelt(router: APIRouter, context: EndpointContext) -> None:
    """A policy for a path without a route."""
    router.add_api_route("/open", lambda: {})
    context.set_policy("/opne", needs_key=False)


def add_slow(router: APIRouter, context: EndpointContext) -> None:
    """One that never ends, and one whose own timeout is not the server's."""

    @router.get("/never")
    async def never() -> None:
        await asyncio.Event().wait()

    @router.get("/others")
    async def others() -> None:
        raise TimeoutError("another server's")


def add_nothing(router: APIRouter, context: EndpointContext) -> None:
    """Fails."""
    raise RuntimeError("not today")


Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a function of this module an endpoint of an installed package."""

    def make(function: str) -> None:
        folder = tmp_path / "others_endpoints-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: others-endpoints\nVersion: 1.0\n")
        place = f"{__name__}:{function}"
        (folder / "entry_points.txt").write_text(f"[slipstream.endpoints]\nexample = {place}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def post(client: TestClient, body: Any, **headers: str) -> Any:
    return client.post("/first-token", json=body, headers=headers)


def test_it_answers_with_the_engine_that_is_served(install: Install, make_app: MakeApp, plain: LLM) -> None:
    install("add_example")
    text = "An example of it:"
    [output] = plain.generate(text, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    with TestClient(make_app()) as client:
        assert post(client, {"text": text}).json() == {
            "model": MODEL,
            "token_id": output.outputs[0].token_ids[0],
        }
        assert client.get("/queue/running").json() == {"running": 0}
        assert client.head("/queue/running").status_code == 200


def test_it_needs_a_key_unless_it_says_otherwise(install: Install, make_app: MakeApp) -> None:
    install("add_example")
    with TestClient(make_app(api_key=["k"])) as client:
        for path in ("/first-token", "/first-token%0A"):  # the router accepts a line end too
            assert client.post(path, json={"text": "a"}).status_code == 401
        assert post(client, {"text": "a"}).json()["error"]["code"] == "invalid_api_key"
        assert post(client, {"text": "a"}, **KEY).status_code == 200
        assert client.get("/queue/waiting").status_code == 200


def test_errors_have_openais_shape(install: Install, make_app: MakeApp) -> None:
    install("add_example")
    with TestClient(make_app(max_body_bytes=2048), raise_server_exceptions=False) as client:
        missing = post(client, {"user": "a"})
        assert missing.status_code == 400
        assert missing.json()["error"] == {
            "message": "text: Field required",
            "type": "invalid_request_error",
            "param": "text",
            "code": "invalid_value",
        }
        assert post(client, {"text": "a" * 4096}).json()["error"]["code"] == "request_too_large"
        plain_text = client.post(
            "/first-token", content=b'{"text": "a"}', headers={"Content-Type": "text/plain"}
        )
        assert plain_text.status_code == 415
        assert post(client, {"text": ""}).json()["error"]["type"] == "invalid_request_error"
        assert client.get("/queue/other").json()["error"]["code"] == "internal_error"
        assert client.delete("/first-token").json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(("method", "path"), [("GET", "/size"), ("DELETE", "/text")])
def test_bodies_are_bounded_for_every_method(
    install: Install, make_app: MakeApp, method: str, path: str
) -> None:
    install("add_sizes")
    with TestClient(make_app(max_body_bytes=2048)) as client:
        assert client.request(method, path, json={"text": "ab"}).status_code == 200
        assert client.request(method, path, json={"text": "a" * 4096}).status_code == 413


def test_a_response_must_begin_in_time(install: Install, make_app: MakeApp) -> None:
    install("add_slow")
    with TestClient(make_app(request_timeout_s=0.05), raise_server_exceptions=False) as client:
        late = client.get("/never")
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
    with TestClient(make_app(), raise_server_exceptions=False) as client:
        assert client.get("/others").status_code == 500


def test_a_drain_refuses_what_changes_something(install: Install, make_app: MakeApp) -> None:
    install("add_sizes")
    app = make_app()
    app.state.service.admission.draining = True
    with TestClient(app) as client:
        assert client.get("/size").json() == 0
        assert client.request("DELETE", "/text", json={"text": "ab"}).status_code == 503


def test_it_is_admitted_counted_and_logged(
    install: Install, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    install("add_example")
    app = make_app()
    with caplog.at_level(logging.INFO, "slipstream.serve.access"), TestClient(app) as client:
        post(client, {"text": "a"})
        assert (
            'http_responses_total{model_name="' + MODEL + '",status="200"} 1.0' in client.get("/metrics").text
        )
        app.state.service.admission.draining = True
        assert post(client, {"text": "a"}).status_code == 503
    fields = [record.fields for record in caplog.records if record.name == "slipstream.serve.access"]  # type: ignore[attr-defined]
    assert [(fact["path"], fact["status"]) for fact in fields] == [
        ("/first-token", 200),
        ("/first-token", 503),
    ]


def test_it_is_documented(install: Install, make_app: MakeApp) -> None:
    install("add_example")
    with TestClient(make_app(api_key=["k"])) as client:
        document = client.get("/openapi.json").json()
    added, open_ = document["paths"]["/first-token"]["post"], document["paths"]["/queue/{name}"]["get"]
    assert added["security"] == [{"key": []}]
    assert "security" not in open_
    body = added["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/FirstTokenBody"}
    assert document["components"]["schemas"]["FirstTokenBody"]["required"] == ["text"]
    assert "422" not in added["responses"]
    error = added["responses"]["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/Error"}


def test_its_requests_have_spans(install: Install, drafting: LLM) -> None:
    install("add_example")
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with TestClient(
        create_app(AsyncEngine(engine=drafting.engine), ServeConfig(), MODEL, provider)
    ) as client:
        post(client, {"text": "a"})
        client.get("/queue/running")
    assert [span.name for span in spans.get_finished_spans()] == [f"first_token {MODEL}"]


def test_code_registers_one_for_this_process(make_app: MakeApp) -> None:
    endpoints.register("example", add_example)
    try:
        endpoints.register("example", add_example)  # the same again
        with pytest.raises(ConfigError, match="endpoint 'example' exists already"):
            endpoints.register("example", add_nothing)
        with TestClient(make_app(api_key=["k"])) as client:
            assert post(client, {"text": "a"}).status_code == 401
            assert post(client, {"text": "a"}, **KEY).status_code == 200
    finally:
        endpoints.unregister("example")
    with TestClient(make_app()) as client:
        assert post(client, {"text": "a"}).status_code == 404


def test_two_packages_may_use_one_name_for_other_routes(install: Install, make_app: MakeApp) -> None:
    install("add_nothing")
    endpoints.register("example", add_example)
    try:
        with pytest.raises(ConfigError, match="RuntimeError: not today"):
            make_app()
    finally:
        endpoints.unregister("example")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("add_taken", "endpoint 'example': GET /health exists already"),
        ("add_web_socket", "only HTTP routes can be added"),
        ("add_unbounded", "adds a APIRoute; only HTTP routes can be added, and each to the router"),
        ("add_misspelt", "endpoint 'example' sets a policy for '/opne', where it adds no route"),
        ("add_nothing", "endpoint 'example' cannot be added: RuntimeError: not today"),
        ("add_missing", "endpoint 'example' cannot be added: AttributeError"),
    ],
)
def test_what_cannot_be_added_is_refused(
    install: Install, make_app: MakeApp, function: str, says: str
) -> None:
    install(function)
    with pytest.raises(ConfigError, match=says):
        make_app()


def test_the_table_is_the_router(make_app: MakeApp) -> None:
    """Every route is in the table, documented or not as the table says, and no other is."""
    app = make_app()
    found = {
        (method, route.path, getattr(route, "include_in_schema", False))  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert found == {(route.method, route.path, route.is_documented) for route in RouteTable()}


@pytest.mark.parametrize(
    ("method", "path", "needs_key"),
    [
        ("POST", "/v1/completions", True),
        ("GET", "/v1/completions", True),
        ("HEAD", "/v1/models", True),
        ("GET", "/v1/models/a/b", True),
        ("GET", "/v1", True),
        ("GET", "/v1/none", True),
        ("POST", "/tokenize\n", True),
        ("GET", "/v10", False),
        ("GET", "/health", False),
        ("GET", "/dashboard", False),
        ("GET", "/dashboard/data", True),
        ("GET", "/none", False),
    ],
)
def test_what_needs_a_key(method: str, path: str, needs_key: bool) -> None:
    assert RouteTable().find({"type": "http", "method": method, "path": path}).needs_key is needs_key
