"""`/dashboard`: the page, and the routes of its data. It knows no engine: a `PageSource` has the figures."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.schema import Body, parse
from slipstream.serve.auth import account_of
from slipstream.serve.dashboard.page_data import PageSource
from slipstream.serve.limits import check_json, read_body

_MAX_ACKNOWLEDGE_BYTES = 4096


class AcknowledgeBody(Body):
    """The alarm that is acknowledged."""

    kind: str
    task: str | None = None
    drafter: str | None = None


def add_page(app: FastAPI, source: PageSource, body_timeout_s: float) -> None:
    """The page itself holds no data and needs no key; its data need one where the server has keys."""
    page, policy = _page()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("dashboard")  # relative, since a proxy may serve this below a path of its own

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return Response(
            page,
            media_type="text/html; charset=utf-8",
            headers={
                "Content-Security-Policy": policy,
                "Cache-Control": "no-cache",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            },
        )

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        found = await source.data(account_of(request.scope))
        return JSONResponse(found.as_json(), headers={"Cache-Control": "no-store"})

    @app.post("/dashboard/acknowledge", include_in_schema=False)
    async def acknowledge(request: Request) -> Response:
        """Clear an alarm: the present level is the reference from now on."""
        check_json(request)
        body = parse(AcknowledgeBody, await read_body(request, _MAX_ACKNOWLEDGE_BYTES, body_timeout_s))
        if not source.acknowledge(body.kind, body.task, body.drafter, account_of(request.scope)):
            raise ApiError(404, "there is no such alarm", code="not_found")
        return JSONResponse({"acknowledged": True})


def _page() -> tuple[str, str]:
    """The page, and its Content-Security-Policy: no style or script but its own, no requests but to its own server."""
    page = (
        resources.files("slipstream.serve.dashboard").joinpath("dashboard.html").read_text(encoding="utf-8")
    )
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
