"""The protocol between an engine and its draft workers: msgpack maps in the frames of `rpc`, version 1.

A map's `type` names the message. Token ids travel, texts and distributions never do: a worker draws with the seed of
the request, as the target does. `docs/reference/draft-protocol.md` describes every message.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from slipstream.errors import ProtocolError
from slipstream.rpc.frames import framed

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 2**20
"""The longest frame once both sides know each other."""
MAX_GREETING_BYTES = 4096
"""The longest frame before."""
MAX_CONTINUATION_TOKENS = 64
"""The most tokens of one continuation, and the most that a worker drafts beyond what is committed."""
MAX_SAMPLING_ENTRIES = 2**20
"""The most tokens that sampling parameters name: more than any vocabulary has."""
HASH_BYTES = 8

Message = dict[str, Any]

Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Word = Annotated[str, msgspec.Meta(max_length=200)]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0)]]
Entries = msgspec.Meta(max_length=MAX_SAMPLING_ENTRIES)
Sampling = Annotated[
    dict[Word, int | float | Annotated[dict[int, float], Entries] | Annotated[list[int], Entries] | None],
    msgspec.Meta(max_length=64),
]

_FIELDS: dict[str, dict[str, Any]] = {
    "hello": {"protocol": int, "nonce": Digest, "depth": int},
    "challenge": {"protocol": int, "nonce": Digest, "needs_key": bool},
    "proof": {"mac": Digest},
    "welcome": {
        "mac": Digest,
        "vocabulary": Digest,
        "vocab_size": int,
        "kind": Word,
        "drafter": Word,
    },
    "refused": {"reason": str},
    "open": {
        "request": int,
        "tokens": TokenIds,
        "hash": Digest,
        "num_prompt_tokens": int,
        "seed": Word,
        "tenant": Digest,
        "sampling": Sampling,
        "number": int,
    },
    "commit": {"request": int, "length": int, "tokens": TokenIds, "hash": Digest, "number": int},
    "release": {"request": int, "finished": bool},
    "tail": {
        "request": int,
        "length": int,
        "hash": Digest,
        "tokens": TokenIds,
        "number": int,
        "draft_s": float | int,
    },
    "unknown": {"request": int},
    "ping": {"sent_s": float | int},
    "pong": {"sent_s": float | int},
}
"""What each message must hold. Fields that are not named here are not read, so that later ones may be added."""
_READERS = {
    name: {field: msgspec.msgpack.Decoder(kind) for field, kind in fields.items()}
    for name, fields in _FIELDS.items()
}
_OUTLINE = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_TYPE = msgspec.msgpack.Decoder(Word)


def encode(message: Message) -> bytes:
    """The message's frame; raises `ProtocolError` where it is too long to be sent."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a message that cannot be written: {error}") from None
    return framed(body, MAX_FRAME_BYTES, message["type"])


def checked(body: bytes, max_tokens: int = MAX_FRAME_BYTES) -> Message:
    """The message of a frame; raises `ProtocolError` unless it is one of this protocol, with values of the right types.

    Lengths come before contents: a list of more than `max_tokens` tokens is not read, and is None in the message.
    Errors name fields and types, never what the other side has sent.
    """
    try:
        outline = _OUTLINE.decode(body)
        name = _TYPE.decode(outline["type"])
        readers = _READERS[name]
    except KeyError:
        raise ProtocolError("a message of no type that this protocol has") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame that is no map with a type: {error}") from None
    message: Message = {"type": name}
    for field, reader in readers.items():
        if field not in outline:
            raise ProtocolError(f"a {name} message without {field}")
        raw = outline[field]
        if field == "tokens" and _array_length(raw) > max_tokens:
            message[field] = None
            continue
        try:
            message[field] = reader.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a {name} message whose {field} cannot be read: {error}") from None
    return message


def _array_length(raw: msgspec.Raw) -> int:
    """How many values a msgpack array says it has; 0 for what is no array."""
    head = bytes(memoryview(raw)[:5])
    if 0x90 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    return int.from_bytes(head[1 : {0xDC: 3, 0xDD: 5}.get(head[0], 1)], "big")


def printable(text: str) -> str:
    """The beginning of what the other side says, on one line whatever characters it has."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:300])


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
