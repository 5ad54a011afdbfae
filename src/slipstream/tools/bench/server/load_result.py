"""The result of a load on a server. Names end in their units; a figure without data is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.tools.bench.result import PooledAcceptance, ServerFigures, WorkloadSummary
from slipstream.tools.bench.statistics import Percentiles


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent: by `concurrency` clients, each after its last answer, or at `rate_per_s` in any case."""

    concurrency: int | None = None
    """A closed loop."""
    rate_per_s: float | None = None
    """An open loop: a Poisson process with this mean number of requests a second."""
    seed: int = 0
    """Seed of the times between arrivals."""

    def __str__(self) -> str:
        if self.rate_per_s is not None:
            return f"open loop, {self.rate_per_s:g} requests a second"
        return f"closed loop, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request; requests are in the order of their ends. Seconds count from the start of the load."""

    task: str
    status: int | None
    """None without a response."""
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
    """False when it was interrupted: the figures are of the requests finished by then."""
    provenance: dict[str, Any]
    url: str
    model: str
    metrics: str
    """Where the server's counters came from, or why there are none."""
    workload: WorkloadSummary
    sampling: dict[str, Any]
    stream: bool
    arrivals: Arrivals
    num_requests_asked: int | None
    """The given limit; None where only a duration was given."""
    duration_s: float | None
    """The given limit on the time of sending."""
    wall_s: float
    """From the first request to the last answer."""
    most_at_once: int
    """The most requests running at the same time."""
    num_unfinished: int
    """Requests running when it was interrupted."""
    lateness_s: Percentiles | None
    """How late this client sent the requests of an open loop; if large, the client was the bottleneck."""
    statuses: dict[str, int]
    """HTTP status to its number of responses; `none` for requests without a response."""
    figures: list[ServerFigures]
    """Figures of all tasks, then by task; their `concurrency` is `most_at_once`."""
    acceptance: dict[str, PooledAcceptance]
    """By task, and for `all`, from the responses' own metrics; empty where they have none."""
    requests: list[LoadRequest]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)
