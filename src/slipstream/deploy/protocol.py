"""What a front and a replica say to each other: frames of JSON over TCP, four bytes of length before each.

    front    -> hello    protocol, front, secret
    replica  -> welcome  protocol, replica, fingerprint, capacity, num_slots, about     or  refused  message
    front    -> start    id, attempt, request (prompt, params, options), emitted
    front    -> cancel   id, attempt
    front    -> flow     id, attempt, paused           whether it gets no steps, because what it makes is not read
    front    -> queue    share, by_account             of the answers that wait at the front, for autoscaling; and
                                                       whether its statistics keep accounts apart
    replica  -> update   id, attempt, update (index, tokens, from_draft, pieces, logprobs,
                                                    finish, output)
    replica  -> refused  id, attempt, message          the request cannot be served by any replica
    replica  -> failed   id, attempt, message          this replica cannot go on with it
    replica  -> beat     report, steps                 from the engine's thread, between two steps; what it
                                                       has counted in all, each step since the last beat, and
                                                       what they made of answers, equal rows once with their number
    replica  -> draining

A front sends token ids and parameters, never a distribution. JSON keeps a float's bits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.deploy.fingerprint import Fingerprint
from slipstream.deploy.fleet import ReplicaFacts
from slipstream.errors import DeployError

PROTOCOL = 5
MAX_FRAME_BYTES = 64 * 2**20
_LENGTH_BYTES = 4

Message = dict[str, Any]


def frame(message: Message) -> bytes:
    """A message as it is sent; raises `DeployError` where it is longer than one may be."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise DeployError(f"a message has {len(data):,} bytes; {MAX_FRAME_BYTES:,} are possible")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> Message | None:
    """The next message, None at the end; raises `DeployError` for what is no frame."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_FRAME_BYTES:
            raise DeployError(f"a frame of {length:,} bytes is no message of slipstream's replica protocol")
        message = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return None
    except ValueError:
        raise DeployError("what was sent is no message of slipstream's replica protocol") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise DeployError("what was sent is no message of slipstream's replica protocol")
    return message


def hello(front: str, secret: str) -> Message:
    """A front's first message."""
    return {"type": "hello", "protocol": PROTOCOL, "front": front, "secret": secret}


def check_protocol(message: Message, who: str) -> None:
    """Raise `DeployError` for another version of the protocol."""
    if message.get("protocol") != PROTOCOL:
        raise DeployError(
            f"{who} speaks version {message.get('protocol')} of the replica protocol, and this one version {PROTOCOL}; "
            "run the same version of slipstream on both sides"
        )


def welcome(facts: ReplicaFacts, about: Message) -> Message:
    """A replica's first message; `about` is what a front must know of its engine."""
    return {
        "type": "welcome",
        "protocol": PROTOCOL,
        "replica": facts.id,
        "fingerprint": facts.fingerprint.as_json(),
        "capacity": facts.capacity,
        "num_slots": facts.num_slots,
        "about": about,
    }


def facts_of(message: Message | None, address: str) -> ReplicaFacts:
    """What a replica says of itself; raises `DeployError` where it says something else."""
    if message is None:
        raise DeployError(f"{address} closed the connection without a word; is it a slipstream replica?")
    if message["type"] == "refused":
        raise DeployError(f"the replica at {address} refuses: {message.get('message')}")
    if message["type"] != "welcome":
        raise DeployError(f"{address} begins with {message['type']!r}; is it a slipstream replica?")
    check_protocol(message, f"the replica at {address}")
    try:
        return ReplicaFacts(
            str(message["replica"]),
            Fingerprint.from_json(message["fingerprint"]),
            max(int(message["capacity"]), 1),
            int(message["num_slots"]),
        )
    except (KeyError, TypeError, ValueError):
        raise DeployError(f"the replica at {address} does not say what it is") from None


def start(request: str, attempt: int, payload: Message, emitted: Seq[Message]) -> Message:
    """Begin a request, or go on with it behind what was `emitted`."""
    return {
        "type": "start",
        "id": request,
        "attempt": attempt,
        "request": payload,
        "emitted": list(emitted),
    }


def cancel(request: str, attempt: int) -> Message:
    """Do not go on with a request."""
    return {"type": "cancel", "id": request, "attempt": attempt}


def flow(request: str, attempt: int, paused: bool) -> Message:
    """Give a request no more steps while what it makes is not read, or go on with it."""
    return {"type": "flow", "id": request, "attempt": attempt, "paused": paused}
