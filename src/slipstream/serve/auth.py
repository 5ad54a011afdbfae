"""API keys, and the accounts and tenants that they separate."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence as Seq

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.serve.api.errors import ApiError
from slipstream.serve.routes import RouteTable

ACCOUNT = "slipstream.account"
"""Key in an ASGI scope of the account that a request's API key belongs to."""


def account_of(scope: Scope) -> str:
    """The account of a request: a digest of its API key, since keys must not be in files or logs; '' where the
    server has no keys."""
    account: str = scope.get(ACCOUNT, "")
    return account


def tenant_of(scope: Scope, user: str | None) -> str:
    """The tenant of a request: its account, and within it the `user`. Tenants share neither prefixes nor drafters'
    state."""
    account = account_of(scope)
    return f"{account}/{user or ''}" if account else user or ""


class KeyGuard:
    """Refuses requests without a known key where the route needs one, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, keys: Seq[str], routes: RouteTable) -> None:
        self._app = app
        self._routes = routes
        self._keys = [(key.encode(), digest(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and self._routes.find(scope).needs_key:
            try:
                scope[ACCOUNT] = self._account(Headers(scope=scope).get("authorization"))
            except ApiError as error:
                error.note(scope)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _account(self, authorization: str | None) -> str:
        """The account of a known key; raises `ApiError` 401. Every key is compared in constant time."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "an API key is needed: send the header 'Authorization: Bearer KEY'"
        else:
            given = key.strip().encode()
            found = [account for known, account in self._keys if hmac.compare_digest(given, known)]
            if found:
                return found[0]
            message = "this API key is not known here"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def digest(key: str) -> str:
    """A digest that identifies a key without revealing it."""
    return hashlib.sha256(b"slipstream account " + key.encode()).hexdigest()[:32]
