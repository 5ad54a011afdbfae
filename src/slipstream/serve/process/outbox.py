"""Bytes on their way to the other process: never more than fit, and written without waiting."""

from __future__ import annotations

import socket
from collections import deque

_WRITE_BYTES = 2**18


class Outbox:
    """A bounded queue before a socket that does not block."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._socket = sock
        self._max_bytes = max_bytes
        self._waiting: deque[memoryview] = deque()
        self.num_bytes = 0
        """That wait to be written."""

    @property
    def is_full(self) -> bool:
        """True while nothing more should be put in."""
        return self.num_bytes >= self._max_bytes

    def put(self, data: bytes) -> None:
        """Queue `data` and write what can be written; raises `OSError` where nobody can read it any more."""
        self._waiting.append(memoryview(data))
        self.num_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes; raises `OSError` as `put` does."""
        while self._waiting:
            first = self._waiting[0]
            try:
                written = self._socket.send(first[:_WRITE_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            self.num_bytes -= written
            if written == len(first):
                self._waiting.popleft()
            else:
                self._waiting[0] = first[written:]
