"""Who may ask: API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence as Seq

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.serve.errors import ApiError

API = ("/v1", "/tokenize", "/detokenize")
GUARDED = (*API, "/dashboard/data", "/dashboard/acknowledge")


class KeyGuard:
    """Refuses guarded paths to whoever has no key, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, keys: Seq[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(scope["path"]) and self._keys:
            error = self._refusal(Headers(scope=scope).get("authorization"))
            if error is not None:
                error.note(scope)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, authorization: str | None) -> ApiError | None:
        """None for a key that is known. Every key is compared in full, so that time tells nothing."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "an API key is needed: send the header 'Authorization: Bearer KEY'"
        elif sum(hmac.compare_digest(key.strip().encode(), known) for known in self._keys):
            return None
        else:
            message = "this API key is not known here"
        headers = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def is_guarded(path: str) -> bool:
    """True for the paths that need a key."""
    return _is_under(path, GUARDED)


def is_api(path: str) -> bool:
    """True for the paths that clients use, each of whose requests is counted and logged."""
    return _is_under(path, API)


def _is_under(path: str, roots: Seq[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)
