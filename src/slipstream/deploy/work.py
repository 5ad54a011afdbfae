"""A request as the router sees it: where it may run, how far it is, what it must keep."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.deploy.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Work:
    """A request's claims, without what it says."""

    id: str
    blocks: Seq[int] = ()
    """Hashes of the prompt's beginnings; see `prefixes.blocks_of`."""
    tenant: str = ""
    account: str = ""
    """Whom it counts for in the queue and where places are short; '' is one of its own."""
    task: str = ""
    num_answers: int = 1
    num_prompt_tokens: int = 0
    min_tokens: int = 1
    """The fewest tokens that a caller could be content with, for the estimate of a deadline."""
    deadline_s: float | None = None
    """When the answer must be complete, by the router's clock."""


class Phase(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's way through the router."""

    work: Work
    arrived_s: float
    phase: Phase = Phase.WAITING
    replica: str | None = None
    is_paused: bool = False
    """It makes no tokens, because those that it has made are not read."""
    attempt: int = 0
    """Counts the replicas that it was given to. What comes from an earlier attempt is dropped: a replica that was taken
    for dead may wake up and go on talking."""
    begun_on: Fingerprint | None = None
    """The arithmetic of its first token."""
    waiting_since_s: float = 0.0
    heard_s: float = 0.0
    """When its replica last said something of it."""
    num_tokens: int = 0
    """Passed on, of all answers."""
    num_fruitless: int = 0
    """Attempts in a row that ended without a token."""
    num_moves: int = 0
    crossed_unlike: bool = False
    """True once it went on with other arithmetic than it was begun with."""
    tried: list[str] = field(default_factory=list)
    """Replicas that it has lost, the last ones."""
