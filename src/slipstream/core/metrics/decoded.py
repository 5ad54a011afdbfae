"""What steps made of answers, in numbers that can be counted elsewhere than in the engine's process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.core.metrics.step import StepReport


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
    """Prompt tokens of the request, said with the first tokens of its first answer; otherwise 0."""
    num_cached_tokens: int = 0
    """Likewise: those of them that were reused."""


class CountedStep(NamedTuple):
    """One step of several that are reported together."""

    report: StepReport
    num_answers: int
    """Those that it decoded."""
    draft_depths: int
    """The levels of their proposals, added up."""


@dataclass(frozen=True, slots=True)
class DecodedSteps:
    """Several steps together: what they made of answers is added up, equal rows being one row with a number."""

    steps: Seq[CountedStep] = ()
    rows: Seq[tuple[DecodedRow, int]] = ()
    """Each with how often it came. Tokens of prompts are not in them but below: every prompt has a length of its own.
    """
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
