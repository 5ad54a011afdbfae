"""Messages on a stream of bytes: each one behind its length, in four bytes, most significant first."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.errors import ProtocolError

LENGTH_BYTES = 4


def framed(body: bytes, max_bytes: int, name: str) -> bytes:
    """A message's body behind its length. Raises `ProtocolError`, which names the message, where it is too long."""
    if len(body) > max_bytes:
        raise ProtocolError(f"the {name} message has {len(body):,} bytes; {max_bytes:,} are possible")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Frames:
    """Cuts a stream of bytes into the bodies of messages. It holds one incomplete body at most."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """The longest body that is accepted."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """More bytes of the stream have come."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole body, None while there is none; raises `ProtocolError` for a length that is too large."""
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        end = LENGTH_BYTES + length
        if len(self._buffer) < LENGTH_BYTES:
            return None
        if length > self.max_bytes:
            raise ProtocolError(
                f"a frame of {length:,} bytes, longer than {self.max_bytes:,}, is no message of Slipstream's"
            )
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body

    def add(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with `data`; raises `ProtocolError` as `next` does."""
        self.feed(data)
        return iter(self.next, None)

    @property
    def num_bytes(self) -> int:
        """Bytes that have come and were not returned yet."""
        return len(self._buffer)
