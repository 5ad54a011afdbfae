"""Messages as MessagePack: typed structures in both directions, so that bytes become values and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import slipstream.errors
from slipstream.errors import ProtocolError, SlipstreamError
from slipstream.rpc.frames import Frames, framed

_SHOWN = 300
"""Characters of a decoder's complaint that an error repeats."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """One message of a protocol: an array that begins with the message's name and has its fields in order.

    Fields may be numbers, text, bytes, paths, lists, dictionaries, dataclasses, named tuples, enumerations and other
    structures. A reader skips fields behind those that it knows.
    """


M = TypeVar("M", bound=WireMessage)


class Codec(Generic[M]):
    """Writes and reads the messages of one protocol."""

    def __init__(self, kinds: Any, max_bytes: int) -> None:
        """`kinds` is the union of the classes of messages; `max_bytes` bounds the body of each."""
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds, dec_hook=_special)

    def frame(self, message: M) -> bytes:
        """A message behind its length. Raises `ProtocolError` where it cannot be written, or is too long."""
        name = type(message).__name__
        try:
            body = self._encoder.encode(message)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise ProtocolError(f"the {name} message cannot be written: {error}") from None
        return framed(body, self.max_bytes, name)

    def read(self, body: bytes) -> M:
        """The message of a frame's body. Raises `ProtocolError` where it is none of this protocol."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, SlipstreamError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:_SHOWN]
            raise ProtocolError(f"a message of the other process cannot be read: {reason}") from None

    def frames(self) -> Frames:
        """What cuts a stream into bodies for `read`."""
        return Frames(self.max_bytes)


def error_out(error: BaseException) -> tuple[str, str]:
    """The name of an error that was raised on purpose, empty for others, and its message."""
    if isinstance(error, SlipstreamError):
        return type(error).__name__, str(error)
    return "", f"{type(error).__name__}: {error}"


def error_in(name: str, message: str) -> Exception:
    """The error that the other process has raised; a `RuntimeError` for one that is not of `slipstream.errors`."""
    kind = getattr(slipstream.errors, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, SlipstreamError):
        return kind(message)
    return RuntimeError(message)


def _plain(value: Any) -> Any:
    """A number of NumPy's as Python's, a path as text."""
    if callable(getattr(value, "item", None)):
        return value.item()
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _special(kind: type, value: Any) -> Any:
    """What `_plain` has written, where a field's type says so."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{type(value).__name__} is no {kind.__name__}")
