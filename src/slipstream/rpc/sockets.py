"""Sockets for an event loop of our own: bounded writing without waiting, reading with it, and wake-ups."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from slipstream.rpc.frames import Frames

READ_BYTES = 2**16
_WRITE_BYTES = 2**18


def next_body(sock: socket.socket, frames: Frames) -> bytes | None:
    """Wait for the next message on a blocking socket; None where the stream has ended. Raises `OSError` for a timeout,
    and `ProtocolError`."""
    while (body := frames.next()) is None:
        try:
            data = sock.recv(READ_BYTES)
        except ConnectionError:  # the other side ended with messages unread
            return None
        if not data:
            return None
        frames.feed(data)
    return body


class Outbox:
    """A bounded queue before a socket on which writing never waits, though reading may."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._socket = sock
        self._max_bytes = max_bytes
        self._waiting: deque[memoryview] = deque()
        self.num_bytes = 0
        """Number of bytes that wait to be written."""

    @property
    def is_full(self) -> bool:
        """True while nothing more should be put in."""
        return self.num_bytes >= self._max_bytes

    def put(self, data: bytes) -> None:
        """Queue `data` and write what can be written; raises `OSError` where the other end cannot read it any more."""
        self._waiting.append(memoryview(data))
        self.num_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes; raises `OSError` as `put` does."""
        while self._waiting:
            first = self._waiting[0]
            try:
                written = self._socket.send(first[:_WRITE_BYTES], socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            self.num_bytes -= written
            if written == len(first):
                self._waiting.popleft()
            else:
                self._waiting[0] = first[written:]


class Waker:
    """Ends another thread's wait on a selector, in which it is registered for reading."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(
            False
        )  # it may be used in the waiting thread itself, where no thread would read
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor for the selector."""
        return self._far.fileno()

    def wake(self) -> None:
        """From any thread; nothing where the waker is closed."""
        with contextlib.suppress(OSError):  # closed, or full of wake-ups
            self._near.send(b"1")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._far.recv(4096)

    def close(self) -> None:
        """Free both sockets."""
        self._near.close()
        self._far.close()
