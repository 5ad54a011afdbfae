"""The policy's input and output: requests, choices, calls of drafters, reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

NO_DRAFTER = -1
"""In place of a drafter's number."""
MAX_TASKS = 256
"""Tasks that are remembered; of more, the latest."""


class Choice(NamedTuple):
    """What is drafted for one sequence; drafters go by their number in `engine.drafting.Drafting`."""

    drafter: int = NO_DRAFTER
    """Who drafts, or `NO_DRAFTER`."""
    depth: int = 0
    """Levels of a chain, the most nodes of anything else."""
    lookup: int = NO_DRAFTER
    """The lookup that is called before that, or `NO_DRAFTER`."""
    min_tokens: int = 0
    """A proposal of the lookup with at least so many tokens makes calling the drafter needless."""

    @property
    def drafts(self) -> bool:
        """False where no drafter is called."""
        return self.drafter != NO_DRAFTER or self.lookup != NO_DRAFTER


NOTHING = Choice()
"""No drafts."""


@dataclass(frozen=True, slots=True)
class PolicyDrafter:
    """A drafter as the policy sees it."""

    name: str
    max_depth: int
    """Levels of a chain; nodes of a tree or a lookup, whose size is not chosen."""
    is_chain: bool
    looks_up: bool = False
    """Takes next to no time, so it is called before the others, and used where its proposal is long enough."""


@dataclass(slots=True)
class StepRequest:
    """A request that decodes in the step at hand, and what the step made of it."""

    sequence_id: int
    task: str
    limit: int
    """The most draft tokens that it may have: by its caller, its length and the memory."""
    length: int = 0
    """Tokens of its text."""
    num_output: int = 0
    """Tokens of its answer so far."""
    allowed: frozenset[int] | None = None
    """The only drafters that may be called: its caller names them, or the others have failed it. None is all."""

    # before the pass
    choice: Choice = NOTHING
    """What is drafted for it."""

    # after the verdict
    drafter: int = NO_DRAFTER
    """Who made the draft, or `NO_DRAFTER`."""
    num_checked: int = 0
    num_reached: int = 0
    """Draft tokens below an accepted path; one more than there are where a chain ended early."""
    num_accepted: int = 0
    num_tokens: int = 0
    """Committed."""
    lookup: int = NO_DRAFTER
    """Who was called first and had nothing, or whose draft was checked; one that was too short comes by `score`."""


Number = Any
"""A float, or an array of them."""


class DraftCall(NamedTuple):
    """How much a drafter was to draft in one call, and of a call that was made who it was and what it took."""

    num_sequences: Number
    num_levels: Number
    """Levels of the deepest chain; 1 for trees and lookups."""
    num_tokens: Number
    """In all."""
    drafter: int = NO_DRAFTER
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Speedup:
    """Tokens a second with speculation over those without, from paired probes, with a 95 % interval."""

    ratio: float
    low: float
    high: float
    num_pairs: int


@dataclass(frozen=True, slots=True)
class MethodReport:
    """One drafter."""

    name: str
    """Its `method`; with a number behind it where several are of the same."""
    acceptance_rate: float | None
    """Recent pooled α: accepted over draft tokens; None before any was checked."""
    survival: tuple[float, ...]
    """The chance that a chain is accepted down to position 1, 2, …; empty for trees and lookups."""
    num_steps: int
    """How often a sequence was drafted for with it."""
    num_failures: int
    """How often it was retired for a sequence that it failed."""
    retired: bool
    """True while it is not called: it hung, or failed too often."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One kind of request, by the name that clients gave it; '' where they gave none."""

    task: str
    method: str | None
    """What drafts for most of it now; None where it is decoded without drafts."""
    depth: float
    """Draft tokens that a step of it checks, recent mean."""
    acceptance_rate: float | None
    acceptance_length: float | None
    """Recent τ: tokens a target pass, the target's own included."""
    break_even: float | None
    """The α (accepted over draft tokens) below which drafts as deep as the task's do not pay at the present costs; None
    before they are known, or where no α pays. Of one draft token where the task is decoded without drafts."""
    estimated_speedup: float | None
    """What the plan gains by the model of costs and acceptance; 1 where it drafts nothing."""
    realised: Speedup | None
    """From paired probes; None before there were enough."""
    num_requests: int = 0
    """Requests of the task that have ended."""
    num_pairs: int = 0
    """Paired probes so far, of the latest that are kept."""


@dataclass(frozen=True, slots=True)
class ControlReport:
    """All of it, at one moment."""

    adaptive: bool
    """False where the operator has fixed the drafter and its depth."""
    speculating: bool
    """Whether anything that runs is drafted for."""
    stands_back: bool
    """True while nothing is drafted because paired probes showed a loss, whatever the estimate."""
    estimated_speedup: float | None
    realised: Speedup | None
    probe_share: float
    """Share of the engine's time that exploration has cost, by estimate."""
    methods: tuple[MethodReport, ...]
    tasks: tuple[TaskReport, ...]
    depth_by_batch: tuple[tuple[int, float], ...]
    """Batch size (sequences that decode) to the recent mean of draft tokens a sequence, for the sizes that occurred."""
    num_pairs: int = 0
    """Paired probes so far, of the latest that are kept."""
    next_probe_s: float | None = None
    """Seconds of steps until the next probe can be paid; None where there will be none: nothing is drafted, or
    `probe_share` is 0."""
