"""What a front and a replica say to each other, over TCP, in the frames of `rpc`.

    front    -> hello    protocol, front, secret                                        as JSON, in every version
    replica  -> welcome  protocol, info, about          or  refused  message           as JSON, in every version

and then, in the codec of `rpc`, the front's `BeginRequest`, `CancelAttempt`, `PauseAttempt` and `QueueShare`, and the
replica's `AttemptUpdate`, `AttemptEnded`, `ReplicaBeat` and `ReplicaDrains`. A front sends token ids and parameters,
never a distribution.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec

from slipstream.core.metrics.decoded import DecodedSteps
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.deploy.fleet import ReplicaInfo, ReplicaReport
from slipstream.errors import DeployError
from slipstream.rpc.codec import Codec, WireMessage
from slipstream.rpc.frames import framed
from slipstream.serve.process.answers import AnswerUpdate

PROTOCOL = 6
MAX_GREETING_BYTES = 2**20

Greeting = dict[str, Any]


class ReplicaMessage(WireMessage, frozen=True):
    """One message behind the greeting."""


class AttemptMessage(ReplicaMessage, frozen=True):
    """About one attempt to serve a request: another replica that goes on with it makes another one."""

    id: str
    attempt: int


class BeginRequest(AttemptMessage, tag="begin", frozen=True):
    """Serve a request, or go on with it behind what was `emitted` of its answers."""

    token_ids: list[int]
    params: dict[str, Any]
    """As `params_out` has them."""
    options: RequestOptions
    emitted: list[EmittedTokens] = msgspec.field(default_factory=list)


class CancelAttempt(AttemptMessage, tag="cancel", frozen=True):
    """Do not go on with a request."""


class PauseAttempt(AttemptMessage, tag="pause", frozen=True):
    """Whether a request gets no more steps, because what it makes is not read."""

    paused: bool


class QueueShare(ReplicaMessage, tag="queue", frozen=True):
    """What a front says for autoscaling and statistics."""

    share: float
    """Share of the answers that wait at the front."""
    by_account: bool
    """Whether the front's statistics keep accounts apart."""


class AttemptUpdate(AttemptMessage, tag="update", frozen=True):
    """What was added to one answer of a request."""

    update: AnswerUpdate


class AttemptEnded(AttemptMessage, tag="ended", frozen=True):
    """A request ends without an answer."""

    message: str
    by_any: bool
    """Whether no replica can serve it; else this one cannot go on with it."""


class ReplicaBeat(ReplicaMessage, tag="beat", frozen=True):
    """What a replica sends from the engine's thread, between two steps."""

    report: ReplicaReport
    """What it has counted in all."""
    steps: DecodedSteps | None = None
    """Those since the last beat, where there are any."""


class ReplicaDrains(ReplicaMessage, tag="draining", frozen=True):
    """The replica will go: it takes nothing new, and what it has should go on elsewhere."""


CODEC = Codec[ReplicaMessage](
    BeginRequest
    | CancelAttempt
    | PauseAttempt
    | QueueShare
    | AttemptUpdate
    | AttemptEnded
    | ReplicaBeat
    | ReplicaDrains,
    max_bytes=64 * 2**20,
)


def greeting_frame(greeting: Greeting) -> bytes:
    """A greeting as it is sent."""
    return framed(json.dumps(greeting, separators=(",", ":")).encode(), MAX_GREETING_BYTES, greeting["type"])


def read_greeting(body: bytes) -> Greeting:
    """The greeting of a frame's body; raises `DeployError` for what is none."""
    try:
        greeting = json.loads(body)
    except (ValueError, RecursionError):
        greeting = None
    if not isinstance(greeting, dict) or not isinstance(greeting.get("type"), str):
        raise DeployError("what was sent is no message of slipstream's replica protocol")
    return greeting


def hello(front: str, secret: str) -> Greeting:
    """A front's first message."""
    return {"type": "hello", "protocol": PROTOCOL, "front": front, "secret": secret}


def welcome(info: ReplicaInfo, about: dict[str, Any]) -> Greeting:
    """A replica's first message; `about` is what a front must know of its engine."""
    return {"type": "welcome", "protocol": PROTOCOL, "facts": asdict(info), "about": about}


def check_protocol(greeting: Greeting, who: str) -> None:
    """Raise `DeployError` for another version of the protocol."""
    if greeting.get("protocol") != PROTOCOL:
        raise DeployError(
            f"{who} speaks version {greeting.get('protocol')} of the replica protocol, and this one version "
            f"{PROTOCOL}; run the same version of slipstream on both sides"
        )


def info_of(greeting: Greeting, address: str) -> ReplicaInfo:
    """What a replica says of itself; raises `DeployError` where it says something else."""
    if greeting["type"] == "refused":
        raise DeployError(f"the replica at {address} refuses: {greeting.get('message')}")
    if greeting["type"] != "welcome":
        raise DeployError(f"{address} begins with {greeting['type']!r}; is it a slipstream replica?")
    check_protocol(greeting, f"the replica at {address}")
    try:
        return msgspec.convert(greeting.get("facts"), ReplicaInfo)
    except msgspec.ValidationError:
        raise DeployError(f"the replica at {address} does not say what it is") from None
