"""Updates that a reader has not taken yet: bounded, because the requests that make them are paused meanwhile."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

MAX_UNREAD_TOKENS = 1024
"""Tokens that may wait for their reader before requests are paused; they go on when half of them are read. A few steps
may still come: those that are under way when the engine is notified."""


class PausableRequest(Protocol):
    """A request whose steps can wait."""

    def set_paused(self, paused: bool) -> None:
        """Have it wait, or go on."""


class UnreadUpdates(Generic[T]):
    """A queue in one event loop, for the updates of one request or of several with one reader."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[T, int]] = asyncio.Queue()
        self._requests: list[PausableRequest] = []
        self.num_tokens = 0
        """Tokens that wait to be read."""
        self.is_paused = False

    def of(self, request: PausableRequest) -> None:
        """The queue holds updates of this request too."""
        self._requests.append(request)
        if self.is_paused:
            request.set_paused(True)

    def put(self, item: T, num_tokens: int = 0) -> None:
        """Add what has come, with the tokens in it."""
        self._items.put_nowait((item, num_tokens))
        self.num_tokens += num_tokens
        if self.num_tokens >= MAX_UNREAD_TOKENS:
            self._set_paused(True)

    async def get(self) -> T:
        """The next item, waited for."""
        item, num_tokens = await self._items.get()
        self.num_tokens -= num_tokens
        if 2 * self.num_tokens <= MAX_UNREAD_TOKENS:
            self._set_paused(False)
        return item

    def _set_paused(self, paused: bool) -> None:
        if paused is not self.is_paused:
            self.is_paused = paused
            for request in self._requests:
                request.set_paused(paused)
