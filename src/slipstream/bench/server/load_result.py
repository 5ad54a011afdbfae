"""What a load on a server reports. Names end in their units; a figure for which there is no data is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.bench.result import PooledAcceptance, ServerFigures, WorkloadFacts
from slipstream.bench.statistics import Percentiles


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent: by `concurrency` clients, each after its last answer, or `rate_per_s` come what may."""

    concurrency: int | None = None
    """A closed loop."""
    rate_per_s: float | None = None
    """An open loop: a Poisson process of so many requests a second on average."""
    seed: int = 0
    """Of the gaps between arrivals."""

    def __str__(self) -> str:
        if self.rate_per_s is not None:
            return f"open loop, {self.rate_per_s:g} requests a second"
        return f"closed loop, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, in the order in which they ended. Seconds count from the beginning of the load."""

    task: str
    status: int | None
    """None where no response came."""
    sent_s: float
    time_to_first_token_s: float | None
    latency_s: float
    num_output_tokens: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load on a server, seen by its clients."""

    schema: int
    kind: str
    complete: bool
    """False when it was interrupted: the figures are of the requests that had ended by then."""
    provenance: dict[str, Any]
    url: str
    model: str
    metrics: str
    """Where the server's counters came from, or why there are none."""
    workload: WorkloadFacts
    sampling: dict[str, Any]
    stream: bool
    arrivals: Arrivals
    num_requests_asked: int | None
    """The bound that was given; None where only time was."""
    duration_s: float | None
    """The bound on sending that was given."""
    wall_s: float
    """From the first request to the last answer."""
    most_at_once: int
    """Requests under way at the busiest moment."""
    num_unfinished: int
    """Under way when it was interrupted."""
    lateness_s: Percentiles | None
    """In an open loop, how late this client sent what was due: where that is long, the client was the bottleneck."""
    statuses: dict[str, int]
    """HTTP status to how often it came; `none` where no response came."""
    figures: list[ServerFigures]
    """Of all tasks, then by task; their `concurrency` is `most_at_once`."""
    acceptance: dict[str, PooledAcceptance]
    """By task, and of `all`, from the figures that responses carried of themselves; empty where they carried none."""
    requests: list[LoadRequest]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)
