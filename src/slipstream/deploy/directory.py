"""Where replicas and fronts of an application find each other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

TTL_S = 20.0
"""A replica that has not renewed its entry for so long is gone."""


class Directory:
    """Addresses of replicas by id, and the secret that they share. A Ray actor in a cluster."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_hex(16)
        self._entries: dict[str, tuple[str, int, float]] = {}

    def secret(self) -> str:
        """What fronts must know to speak to replicas."""
        return self._secret

    def register(self, replica: str, host: str, port: int) -> None:
        """Enter a replica, or renew its entry."""
        self._entries[replica] = host, port, self._clock()

    def drop(self, replica: str) -> None:
        """A replica goes."""
        self._entries.pop(replica, None)

    def addresses(self) -> list[tuple[str, int]]:
        """Return the addresses of all that have renewed their entries."""
        oldest_s = self._clock() - TTL_S
        self._entries = {name: entry for name, entry in self._entries.items() if entry[2] >= oldest_s}
        return [(host, port) for host, port, _ in self._entries.values()]
