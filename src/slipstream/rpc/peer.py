"""A connection over asyncio's streams: whole messages in, whole messages out, and bounds in both directions."""

from __future__ import annotations

import asyncio
import contextlib

from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import READ_BYTES


class Peer:
    """The other end of a connection. Belongs to one event loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: Frames,
        max_unread_bytes: int | None = None,
    ) -> None:
        """A peer that leaves more than `max_unread_bytes` unread is left: it hangs, or is dead."""
        self.frames = frames
        self.writer = writer
        self._reader = reader
        self._max_unread_bytes = max_unread_bytes

    async def read(self) -> bytes | None:
        """The body of the next message; None where the connection has ended. Raises `ProtocolError`."""
        while (body := self.frames.next()) is None:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self.frames.feed(data)
        return body

    def send(self, data: bytes) -> bool:
        """Send frames without waiting; a closed connection takes them to nowhere. False where the peer is left now."""
        transport = self.writer.transport
        if transport.is_closing():
            return True
        transport.write(data)
        if self._max_unread_bytes is None or transport.get_write_buffer_size() <= self._max_unread_bytes:
            return True
        self.leave()
        return False

    def leave(self) -> None:
        """Close at once: what was not sent is lost."""
        self.writer.transport.abort()

    async def close(self) -> None:
        """Close once all was sent, and wait for it."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
