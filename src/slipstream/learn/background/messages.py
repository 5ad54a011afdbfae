"""What a server and its learner's process say to each other."""

from __future__ import annotations

from typing import Any

from slipstream.rpc.codec import Codec, WireMessage


class LearnMessage(WireMessage, frozen=True):
    """A message between a server and its learner's process."""


class LearnEvent(LearnMessage, tag="event", frozen=True):
    """What became of the learner's work, or only that it is alive."""

    event: str
    status: dict[str, Any]


class DraftingCosts(LearnMessage, tag="costs", frozen=True):
    """What drafting costs a step, in passes of the target: with the base drafter and with a version."""

    base: float
    version: float


class LeaveToKeep(LearnMessage, tag="keep", frozen=True):
    """The learner may write a version down."""


CODEC = Codec[LearnMessage](LearnEvent | DraftingCosts | LeaveToKeep, max_bytes=2**20)
