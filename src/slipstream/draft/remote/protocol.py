"""The protocol between an engine and its draft workers: framed msgpack maps, version 1.

A frame is its length, four bytes, most significant first, and that many bytes of one msgpack map whose `type` names the
message. Token ids travel, texts and distributions never do: a worker draws with the seed of the request, as the target
does. `docs/reference/draft-protocol.md` describes every message.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Any

import msgspec

from slipstream.errors import RemoteError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 2**20
"""The longest frame once both sides know each other."""
MAX_GREETING_BYTES = 4096
"""The longest frame before."""
MAX_TAIL_TOKENS = 64
"""The most tokens of one tail, and the most that a worker drafts beyond what is committed."""
HASH_BYTES = 8

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"protocol": int, "nonce": bytes, "depth": int},
    "challenge": {"protocol": int, "nonce": bytes, "needs_key": bool},
    "proof": {"mac": bytes},
    "welcome": {
        "mac": bytes,
        "vocabulary": bytes,
        "vocab_size": int,
        "kind": str,
        "drafter": str,
    },
    "refused": {"reason": str},
    "open": {
        "request": int,
        "tokens": list,
        "hash": bytes,
        "num_prompt_tokens": int,
        "seed": str,
        "tenant": bytes,
        "sampling": dict,
        "number": int,
    },
    "commit": {"request": int, "length": int, "tokens": list, "hash": bytes, "number": int},
    "release": {"request": int, "finished": bool},
    "tail": {
        "request": int,
        "length": int,
        "hash": bytes,
        "tokens": list,
        "number": int,
        "draft_s": (float, int),
    },
    "unknown": {"request": int},
    "ping": {"sent_s": (float, int)},
    "pong": {"sent_s": (float, int)},
}
"""What each message must hold. Fields that are not named here are ignored, so that later ones may be added."""


class FrameError(RemoteError):
    """What arrived is no message of this protocol; the connection is of no use any more."""


def encode(message: Message) -> bytes:
    """The message's frame; raises `FrameError` where it is too long to be sent."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise FrameError(f"a message that cannot be written: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body):,} bytes is longer than {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


class MessageDecoder:
    """Cuts a stream of bytes into messages and checks each. It holds one frame at most."""

    def __init__(self, max_bytes: int = MAX_GREETING_BYTES) -> None:
        self.max_bytes = max_bytes
        """The longest frame that is accepted."""
        self.num_message_bytes = 0
        """Of the message that came last."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with `data`; raises `FrameError` at the first that is none."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise FrameError(f"a frame of {length:,} bytes, longer than {self.max_bytes:,}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            self.num_message_bytes = length
            yield checked(body)


def checked(body: bytes) -> Message:
    """The message of a frame; raises `FrameError` unless it is one of this protocol, with values of the right types."""
    try:
        message = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"a frame that is not msgpack: {error}") from None
    name = message.get("type") if isinstance(message, dict) else None
    fields = _FIELDS.get(name) if isinstance(name, str) else None
    if fields is None:
        raise FrameError(f"a message of the unknown type {name!r}")
    for field, kind in fields.items():
        value = message.get(field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FrameError(f"a {name} message with {field} {value!r}")
    if not all(type(token) is int and token >= 0 for token in message.get("tokens", ())):
        raise FrameError(f"a {name} message whose tokens are not token ids")
    result: Message = message
    return result


class PrefixHash:
    """The hash of a text's tokens, extended as the text grows."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=HASH_BYTES)
        self.length = 0
        """Tokens so far."""

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens, each as eight bytes."""
        self._hash.update(_bytes_of(token_ids))
        self.length += len(token_ids)

    def digest(self, more: Seq[int] = ()) -> bytes:
        """The hash of the tokens so far and `more`."""
        if not more:
            return self._hash.digest()
        extended = self._hash.copy()
        extended.update(_bytes_of(more))
        return extended.digest()

    def copy(self) -> PrefixHash:
        """Another one of the same tokens."""
        other = PrefixHash()
        other._hash, other.length = self._hash.copy(), self.length
        return other


def _bytes_of(token_ids: Seq[int]) -> bytes:
    numbers = array("Q", token_ids)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


_BIG_ENDIAN = array("Q", [1]).tobytes()[0] == 0
