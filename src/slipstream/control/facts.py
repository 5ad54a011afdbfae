"""What the controller is told of a step that is over."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from slipstream.control.realised import Gain
from slipstream.control.step_cost import Drafted
from slipstream.draft.choice import NOBODY


class Outcome(NamedTuple):
    """What a step made of one request."""

    sequence_id: int
    task: str
    member: int
    depth: int
    """As chosen."""
    num_checked: int
    num_reached: int
    num_accepted: int
    num_tokens: int
    """Emitted."""
    lookup: int = NOBODY
    """Who was asked first and had nothing, or whose guess was checked; a guess that was not taken comes by `score`."""


class Call(NamedTuple):
    """One drafter's work in a step."""

    member: int
    drafted: Drafted
    seconds: float


class StepFacts(NamedTuple):
    """What a step did and took."""

    num_rows: int
    """Of its pass, drafts included."""
    num_others: int
    """Rows that were none of a request that was asked about."""
    undrafted_s: float
    """All of it but the calls and the books."""
    calls: Seq[Call]
    outcomes: Seq[Outcome]
    """Of some of the requests; of more than `MAX_LEARNED`, each in its turn."""
    num_drafted: int
    """Requests for which something was checked."""
    num_checked: int
    gains: Seq[Gain]
    """Of all requests."""
    books_s: float = 0.0
    """Asking the controller and telling it."""

    @property
    def seconds(self) -> float:
        """All of the step but the books, which are not kept in every one."""
        return self.undrafted_s + sum(call.seconds for call in self.calls)
