"""What the server's process and the engine's process say to each other, and how it is written.

Messages are MessagePack arrays whose first item is the message's name, each behind its length in four bytes (big
endian), on one stream in both directions. `docs/reference/processes.md` describes them for people.

Closing the stream ends everything: the engine drops what nobody reads and exits.

A difference of `VERSION` is refused at the first message, whose own form never changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from slipstream.control.types import ControlReport
from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.metrics.step import StepReport
from slipstream.core.types import EmittedTokens, FinishReason, RequestOptions, TokenLogprob
from slipstream.errors import ProtocolError
from slipstream.learn.facts import LearnFacts
from slipstream.serve.facts import EngineFacts

VERSION = 3
MAX_FRAME_BYTES = 256 * 2**20
"""The largest message; a longer one is not from a Slipstream."""
_LENGTH_BYTES = 4


class EngineMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """One message."""


class Hello(EngineMessage, tag="hello", frozen=True):
    """The first message in both directions. In every version it begins with these two."""

    version: int
    slipstream: str
    """For people; only `version` decides."""


# --- from the server to the engine ------------------------------------------------------------------------------------


class LoadLearning(msgspec.Struct, frozen=True, array_like=True):
    """What is told to an engine whose drafter learns; `speculative` is then that of `versions`."""

    folder: str
    max_bytes: int
    denied: list[str]
    """Tenants of whom nothing is kept, and accounts."""
    by: str = "everyone"
    learner: str | None = None
    allowed: list[str] = []
    """Tenants that are learned from, and accounts."""
    by_default: bool = True
    """Whether those that are in neither list are learned from."""
    max_age_s: float | None = None


class Load(EngineMessage, tag="load", frozen=True):
    """Load this engine; answered with `Loaded` or `Failed`."""

    model: str | None
    """None: the small target that ships with the package."""
    speculative: dict[str, Any]
    """The fields of `SpeculativeConfig`."""
    engine: dict[str, Any]
    """As `make_engine` takes it."""
    has_keys: bool
    """Whether statistics keep the accounts of API keys apart."""
    stream_interval_s: float
    """Updates that come within this time may be sent as one; first and last ones are not held back."""
    log_level: str
    log_format: str
    learn: LoadLearning | None = None
    """Where the drafter goes on learning from what is served, if it does."""


class Submit(EngineMessage, tag="submit", frozen=True):
    """Answer this. `Steps` bring its updates, or one `Refused` says why not."""

    id: int
    """Names the request in all messages about it; never used twice."""
    request_id: str
    """Names it in logs."""
    token_ids: list[int]
    bad_words: list[list[int]]
    params: dict[str, Any]
    """The fields of `SamplingParams` that are not at their defaults. Without `detokenize` the server makes the text."""
    options: RequestOptions
    tried_bytes: int | None = None
    """What compiling the constraint on trial found; None leaves the trial to the engine."""
    emitted: list[EmittedTokens] = []
    """What an engine has emitted of each answer before: this one goes on behind it, with `params.seed`."""


class CancelRequest(EngineMessage, tag="cancel", frozen=True):
    """End a request. Unknown ids, such as of one that has just ended, are ignored."""

    id: int
    reports: bool
    """Whether its last updates are still wanted."""


class Flow(EngineMessage, tag="flow", frozen=True):
    """Whether a request gets steps: `paused` while what it makes is not read. Unknown ids are ignored."""

    id: int
    paused: bool


class Read(EngineMessage, tag="read", frozen=True):
    """Send a `State`."""

    number: int


# --- from the engine to the server ------------------------------------------------------------------------------------


class Loaded(EngineMessage, tag="loaded", frozen=True):
    """The engine takes requests."""

    facts: EngineFacts


class Failed(EngineMessage, tag="failed", frozen=True):
    """The engine could not be loaded; the process exits."""

    error: str
    """The name of a class of `slipstream.errors`, or empty for a fault that nobody foresaw."""
    message: str


class AnswerEnd(msgspec.Struct, frozen=True, array_like=True):
    """One answer of a request that has ended; what its updates have said is not repeated."""

    text: str | None
    """None where `detokenize` is false."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    seed: int
    metrics: RequestMetrics


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended."""

    answers: list[AnswerEnd]
    prompt_logprobs: list[TokenLogprob | None] | None


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What some steps added to one answer."""

    id: int
    index: int
    token_ids: list[int]
    from_draft: list[bool]
    pieces: list[tuple[str, bool]] | None = None
    """Released text, and whether a draft token yielded it; None where `detokenize` is false."""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    end: RequestEnd | None = None
    """With the update that ends the request's last answer."""


class Steps(EngineMessage, tag="steps", frozen=True):
    """One step of the engine, or some: their reports, and what they added to answers."""

    reports: list[StepReport]
    rows: list[DecodedRow]
    """Of all these steps, but each list is one step's: `lengths` says how many belong to each."""
    lengths: list[int]
    updates: list[AnswerUpdate]


class Refused(EngineMessage, tag="refused", frozen=True):
    """A request that the engine does not serve."""

    id: int
    error: str
    """As in `Failed`."""
    message: str


class State(EngineMessage, tag="state", frozen=True):
    """The engine between two steps, as `Read` asked."""

    number: int
    stats: EngineStats
    report: ControlReport
    learning: LearnFacts | None = None


class Stopped(EngineMessage, tag="stopped", frozen=True):
    """The engine has failed under way; the process exits."""

    message: str


ToEngine = Load | Submit | CancelRequest | Flow | Read
FromEngine = Loaded | Failed | Steps | Refused | State | Stopped

# --- how they are written ---------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A number of NumPy's as Python's, a path as text."""
    if callable(getattr(value, "item", None)):
        return value.item()
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | ToEngine)
_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | FromEngine)


def frame(message: EngineMessage) -> bytes:
    """A message with its length before it. Raises `ProtocolError` where it cannot be written."""
    try:
        body = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a {type(message).__name__} cannot be written: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} has {len(body):,} bytes; {MAX_FRAME_BYTES:,} are possible"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_to_engine(body: bytes) -> Hello | ToEngine:
    """A message of the server's; raises `ProtocolError`."""
    message: Hello | ToEngine = _read(_to_engine, body)
    return message


def read_from_engine(body: bytes) -> Hello | FromEngine:
    """A message of the engine's; raises `ProtocolError`."""
    message: Hello | FromEngine = _read(_from_engine, body)
    return message


def _read(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a message of the other process cannot be read: {error}") from None


class Frames:
    """Cuts a stream of bytes into the bodies of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with `data`; raises `ProtocolError` for a length that no message has."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH_BYTES:
                length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError("what came from the other process is no message of Slipstream's")
                end = start + _LENGTH_BYTES + length
                if len(buffer) < end:
                    return
                body = bytes(buffer[start + _LENGTH_BYTES : end])
                start = end
                yield body
        finally:
            del buffer[:start]

    @property
    def num_bytes(self) -> int:
        """Of the message that is incomplete."""
        return len(self._buffer)


def check_version(hello: object, mine: str) -> None:
    """Raise `ProtocolError` unless the first message of the other process is a `Hello` of this version.

    `mine` is this process's release.
    """
    if not isinstance(hello, Hello):
        raise ProtocolError(f"the other process began with {type(hello).__name__}, not with Hello")
    if hello.version != VERSION:
        raise ProtocolError(
            f"the other process speaks version {hello.version} of the engine protocol (Slipstream {hello.slipstream}), "
            f"this one version {VERSION} (Slipstream {mine}); run the same release on both sides"
        )


def steps_of(message: Steps) -> Iterator[tuple[StepReport, Seq[DecodedRow]]]:
    """The steps of a message, each with its rows."""
    start = 0
    for report, length in zip(message.reports, message.lengths, strict=True):
        yield report, message.rows[start : start + length]
        start += length
