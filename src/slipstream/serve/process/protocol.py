"""What the server's process and the engine's process say to each other, in the frames and the codec of `rpc`.

`docs/reference/processes.md` describes the messages for people.

Closing the stream ends everything: the engine drops what is read no more and exits.

A difference of `VERSION` is refused at the first message, whose own form never changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import numpy as np

from slipstream.config import SpeculativeConfig
from slipstream.control.types import ControlReport
from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.errors import ProtocolError
from slipstream.learn.server_status import ServerLearnStatus
from slipstream.learn.session import SessionSettings
from slipstream.rpc.codec import Codec, WireMessage
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.answers import AnswerUpdate
from slipstream.text.encoder_input import EncoderInput

VERSION = 5


class EngineMessage(WireMessage, frozen=True):
    """One message."""


class Hello(EngineMessage, tag="hello", frozen=True):
    """The first message in both directions. In every version it begins with these two."""

    version: int
    slipstream: str
    """For people; only `version` decides."""


# --- from the server to the engine ------------------------------------------------------------------------------------


class Load(EngineMessage, tag="load", frozen=True):
    """Load this engine; answered with `Loaded` or `Failed`."""

    model: str | None
    """None: the small target that ships with the package."""
    speculative: SpeculativeConfig
    engine: dict[str, Any]
    """As `make_engine` takes it."""
    has_keys: bool
    """Whether statistics keep the accounts of API keys apart."""
    stream_interval_s: float
    """Updates that come within this time may be sent as one; first and last ones are not held back."""
    log_level: str
    log_format: str
    learn: SessionSettings | None = None
    """How the drafter goes on learning from what is served, if it does; `speculative` is then that of `versions`."""


class EncoderMessage(msgspec.Struct, frozen=True):
    """What the encoder of an encoder-decoder reads."""

    token_ids: list[int]
    features: bytes = b""
    """float32, row after row; empty for a text."""
    num_bins: int = 0
    """Rows of the features."""

    @classmethod
    def of(cls, given: EncoderInput | None) -> EncoderMessage | None:
        """The message of an input."""
        if given is None:
            return None
        if given.features is None:
            return cls(list(given.token_ids))
        return cls([], given.features.tobytes(), len(given.features))

    def input(self) -> EncoderInput:
        """The input of a message."""
        if not self.features:
            return EncoderInput(tuple(self.token_ids))
        features = np.frombuffer(self.features, np.float32).reshape(self.num_bins, -1)
        return EncoderInput(features=features.copy())


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
    emitted: list[EmittedTokens] = msgspec.field(default_factory=list)
    """What an engine has emitted of each answer before: this one goes on behind it, with `params.seed`."""
    encoder_input: EncoderMessage | None = None
    """None for a model without an encoder."""


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

    info: EngineInfo


class Failed(EngineMessage, tag="failed", frozen=True):
    """The engine could not be loaded; the process exits."""

    error: str
    """The name of a class of `slipstream.errors`, or empty for a fault that was not foreseen."""
    message: str


class Steps(EngineMessage, tag="steps", frozen=True):
    """One step of the engine, or some: their reports, and what they added to answers."""

    reports: list[StepReport]
    rows: list[DecodedRow]
    """Rows of all these steps, in order; `lengths` says how many belong to each step."""
    lengths: list[int]
    updates: list[tuple[int, AnswerUpdate]]
    """Each with the number of its request."""


class Refused(EngineMessage, tag="refused", frozen=True):
    """A request that the engine does not serve."""

    id: int
    error: str
    """As in `Failed`."""
    message: str


class State(EngineMessage, tag="state", frozen=True):
    """The engine between two steps, as `Read` requested."""

    number: int
    stats: EngineStats
    report: ControlReport
    learning: ServerLearnStatus | None = None


class Stopped(EngineMessage, tag="stopped", frozen=True):
    """The engine has failed under way; the process exits."""

    message: str


CODEC = Codec[EngineMessage](
    Hello | Load | Submit | CancelRequest | Flow | Read | Loaded | Failed | Steps | Refused | State | Stopped,
    max_bytes=256 * 2**20,
)
"""All messages of both directions."""


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
