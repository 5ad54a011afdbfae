"""What is chosen between, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_TASKS = 256
"""Tasks that are remembered; of more, those that came last."""


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter that can be chosen."""

    name: str
    max_depth: int
    """Levels of a chain; nodes of a tree or a lookup, which are not chosen but taken as they come."""
    is_chain: bool
    looks_up: bool = False
    """Takes next to no time, so it is asked before the others, and its guess is taken where it is long enough."""


class Asked(NamedTuple):
    """A request of the step at hand."""

    sequence_id: int
    task: str
    limit: int
    """The most draft tokens that it may have: by its caller, its length and the memory."""
    length: int = 0
    """Tokens of its text."""
    num_output: int = 0
    """Those of them that are its answer."""
    members: frozenset[int] | None = None
    """The only drafters that its caller wants and that still serve it; None is all."""
