"""The state of a draft worker, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

WORKER_STATES = ("connected", "away", "refused")


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What an engine has seen of one draft worker since it was made."""

    address: str
    state: str
    """`connected`; `away`: it cannot be reached now; `refused`: it is of no use here, `why` says why."""
    why: str
    """Why it is not connected; empty while it is."""
    round_trip_s: float | None
    """The last ping's time there and back; None before one was answered."""
    continuation_s: float | None
    """From what was committed to the first continuation for it, on average of late; None before there was one."""
    num_continuations: int
    """Continuations that arrived."""
    num_stale_continuations: int
    """Those of them that were dropped, for another prefix than the text's."""
    num_late_continuations: int
    """Proposals that were empty because the continuation had not arrived."""
    num_connections: int
    """How often it was connected."""
