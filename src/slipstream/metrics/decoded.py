"""What a step made of one answer, in numbers that can be counted elsewhere than in the engine's process."""

from __future__ import annotations

from typing import NamedTuple


class DecodedRow(NamedTuple):
    """One answer in one step."""

    group: str
    """The name under which statistics keep its task; it may hold more than `task`, such as an account."""
    task: str
    """The task as its caller named it."""
    method: str
    """Who drafted for it."""
    num_emitted: int
    num_drafted: int
    """Draft tokens that were checked."""
    draft_depth: int
    """Levels of the proposal."""
    num_accepted: int
    """Accepted draft tokens that were emitted."""
    num_reached: int
    """Positions of the proposal that were judged."""
    num_prompt_tokens: int = 0
    """Of the request, with the first tokens of its first answer; otherwise 0."""
    num_cached_tokens: int = 0
    """Likewise: those of them that were reused."""
