"""Every refusal in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from slipstream.errors import EngineStoppedError, RequestError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is not served, with the HTTP status that says so. The message is for the client to read."""

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
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON, in a response or in an event of a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """As a whole HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """503: not now."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception; what is our fault is logged and not described."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, EngineStoppedError):
        return unavailable(str(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", kind="server_error", code="internal_error")


_HTTP_ERRORS = {
    404: ("there is no {method} {path}; see /v1/models for what is served", "not_found"),
    405: ("{path} does not take {method}", "method_not_allowed"),
}


def _of_http_error(request: Request, error: HTTPException) -> ApiError:
    """What the routing itself refuses."""
    words, code = _HTTP_ERRORS.get(error.status_code, (str(error.detail), None))
    message = words.format(method=request.method, path=request.url.path)
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def install(app: FastAPI) -> None:
    """Have every exception of a route answered in shape."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return _of_http_error(request, error).response()
        return as_api_error(error).response()

    for kind in (ApiError, RequestError, EngineStoppedError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
