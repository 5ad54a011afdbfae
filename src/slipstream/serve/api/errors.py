"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from slipstream.errors import (
    EngineBusyError,
    EngineStoppedError,
    PredictionError,
    ReasoningError,
    RequestError,
)

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""The status in the log of a request whose client disconnected before the response, as in nginx."""
LOG_FIELDS = "slipstream.log_fields"
"""Key in an ASGI scope of the fields that the access log writes for the request."""


MAX_MESSAGE = 2000
MAX_NAME = 200
"""Most characters of an error's message and parameter, which may repeat what the client sent, also in the log."""


class ApiError(Exception):
    """A request that is refused, with its HTTP status and a message for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = clipped(message, MAX_MESSAGE)
        self.kind = kind
        self.param = None if param is None else clipped(param, MAX_NAME)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return it as JSON, in a response or in an event of a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def note(self, scope: Scope) -> None:
        """Add the error to the request's log line. Messages name parameters and bounds; they hold no text of a
        prompt."""
        fields = {"error_code": self.code, "error_param": self.param, "error_message": self.message}
        scope.get(LOG_FIELDS, {}).update({key: value for key, value in fields.items() if value is not None})

    def response(self) -> Response:
        """As a whole HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def clipped(text: str, most: int) -> str:
    """The text, cut to `most` characters with an ellipsis where it is longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def invalid(message: str, param: str | None = None) -> ApiError:
    """400 for a value that the server does not take, of the parameter `param`."""
    return ApiError(400, message, param=param, code="invalid_value")


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """503, with `Retry-After`."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def context_exceeded(param: str, max_model_len: int, however: str) -> ApiError:
    """400: prompt and answer do not fit into the context. Clients recognise the first sentence as well as the code."""
    message = f"This model's maximum context length is {max_model_len} tokens. However, {however}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception. A fault of the server is logged and not described to the
    client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PredictionError):
        return invalid(str(error), "prediction")
    if isinstance(error, ReasoningError):
        return invalid(str(error), "speculation.reasoning")
    if isinstance(error, RequestError):
        return invalid(str(error))
    if isinstance(error, RequestValidationError):  # of a body that FastAPI parses: an added endpoint's
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        return invalid(message, place or None)
    if isinstance(error, (EngineStoppedError, EngineBusyError)):
        return unavailable(str(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(
        500,
        "the server failed; its log says why",
        kind="server_error",
        code="internal_error",
        headers={"Connection": "close"},  # the HTTP server closes after an exception
    )


_HTTP_ERRORS = {
    404: ("there is no {method} {path}; /openapi.json lists the paths", "not_found"),
    405: ("{path} does not take {method}", "method_not_allowed"),
}


def _of_http_error(request: Request, error: HTTPException) -> ApiError:
    """The error for an unknown path or method."""
    words, code = _HTTP_ERRORS.get(error.status_code, (str(error.detail), None))
    message = words.format(method=request.method, path=request.url.path)
    if error.status_code == 404 and (meant := _meant(request)) is not None:
        message = f"there is no {request.method} {request.url.path}; did you mean {meant}?"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _meant(request: Request) -> str | None:
    """The known path that differs from the requested one by a missing or repeated `/v1`, or by a typing error."""
    known = {
        _bare(path): path for route in request.app.routes if "{" not in (path := getattr(route, "path", "{"))
    }
    near = difflib.get_close_matches(_bare(request.url.path), list(known), n=1, cutoff=0.85)
    return known[near[0]] if near else None


def _bare(path: str) -> str:
    return re.sub(r"^(/v1)+(?=/)", "", path.lower()).rstrip("/")


def install(app: FastAPI) -> None:
    """Answer every exception of a route in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        refusal = _of_http_error(request, error) if isinstance(error, HTTPException) else as_api_error(error)
        refusal.note(request.scope)
        return refusal.response()

    for kind in (
        ApiError,
        RequestError,
        EngineStoppedError,
        EngineBusyError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
