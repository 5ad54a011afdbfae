"""What the control of speculation has found out, for metrics, the dashboard and alarms."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Pooled α lately: accepted over draft tokens; None before any was checked."""
    survival: tuple[float, ...]
    """The chance that a draft stands down to position 1, 2, …; empty for trees and lookups."""
    num_steps: int
    """How often a sequence was drafted for with it."""
    num_failures: int
    """How often it was retired for a sequence that it failed."""
    retired: bool
    """True once it is never asked again: it hung, or failed too often."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One kind of request, by the name that clients gave it; '' where they gave none."""

    task: str
    method: str | None
    """What drafts for most of it now; None where it is decoded without drafts."""
    depth: float
    """Draft tokens that a step of it checks, on average lately."""
    acceptance_rate: float | None
    acceptance_length: float | None
    """τ lately: tokens a target pass, the target's own included."""
    break_even: float | None
    """The α under which drafting one token for it does not pay at the costs of late; None before they are known, or
    where no α pays."""
    estimated_speedup: float | None
    """What drafting as it is done now gains by the model of costs and acceptance; 1 where it is off."""
    realised: Speedup | None
    """From paired probes; None before there were any."""


@dataclass(frozen=True, slots=True)
class ControlReport:
    """All of it, at one moment."""

    adaptive: bool
    """False where the operator has fixed the drafter and its depth."""
    speculating: bool
    """Whether anything that runs is drafted for."""
    stands_back: bool
    """True while nothing is drafted because paired probes said that drafts lose, whatever the estimate says."""
    estimated_speedup: float | None
    realised: Speedup | None
    probe_share: float
    """Share of the engine's time that probes and tries have cost, by estimate."""
    methods: tuple[MethodReport, ...]
    tasks: tuple[TaskReport, ...]
    depth_by_batch: tuple[tuple[int, float], ...]
    """Batch size (sequences that decode) to the mean depth chosen lately, for the sizes that occurred."""
