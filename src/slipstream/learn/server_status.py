"""What a server that learns shows of it. No torch is imported here: another process may be the one that learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.learn.decisions.loop import BASE


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """What was captured so far."""

    num_records: int = 0
    num_skipped: Mapping[str, int] = field(default_factory=dict)
    """Answers that no record was made of, by reason."""
    capture_s: float = 0.0
    """Time in the engine's thread, what waits for the interpreter included."""
    reduce_s: float = 0.0
    """Processor time of the capture's own thread."""
    waiting_bytes: int = 0
    fault: str = ""
    """Why records cannot be written at present; empty while they can."""


@dataclass(frozen=True)
class ServerLearnStatus:
    """What a page or a scrape shows."""

    serving: str = BASE
    canary: str | None = None
    frozen: bool = False
    own_scopes: int = 0
    """Tenants or tasks that have a version of their own."""
    by_version: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Version to its requests and the sum of their tokens a pass."""
    num_refused: int = 0
    num_promoted: int = 0
    num_rolled_back: int = 0
    events: tuple[dict[str, Any], ...] = ()
    """The latest first."""
    learner_cpu_s: float = 0.0
    learner_rested_s: float = 0.0
    learner_deaths: int = 0
    rests: bool = False
    capture: CaptureStatus | None = None
    faults: dict[str, str] = field(default_factory=dict)
    """Kind of alarm to its message."""
