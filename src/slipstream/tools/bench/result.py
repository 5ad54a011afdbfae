"""Results of benchmarks. Names end in their units; a figure without data is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.core.metrics.request import RequestMetrics
from slipstream.tools.bench.statistics import Interval, Percentiles


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


EMBEDDED = "embedded pair"
"""Name of the default model."""
SCHEMA = 1
"""Version of the JSON; incremented when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class PooledAcceptance:
    """Acceptance, pooled over all requests."""

    num_steps: int
    """Target passes that committed tokens, counted per sequence."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_wasted_tokens: int
    """Draft tokens that were rejected."""
    rate: float | None
    """α, pooled: accepted over drafted."""
    conditional: list[float]
    """Conditional α: entry i is accepted at position i + 1 over the steps that reached and proposed it."""
    length: float | None
    """τ: tokens a target pass."""
    reached_per_position: list[int]
    """Entry i: steps that proposed position i + 1 below an accepted path."""
    accepted_per_position: list[int]

    @classmethod
    def of(cls, counts: RequestMetrics) -> PooledAcceptance:
        """The rates of `counts`, as `slipstream.core.metrics.request` defines them; None for a rate without data."""
        drafted = counts.num_draft_tokens
        return cls(
            num_steps=counts.num_steps,
            num_draft_tokens=drafted,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_wasted_tokens=drafted - counts.num_accepted_tokens,
            rate=counts.acceptance_rate if drafted else None,
            conditional=counts.conditional_acceptance,
            length=counts.acceptance_length if counts.num_steps else None,
            reached_per_position=counts.reached_per_position,
            accepted_per_position=counts.accepted_per_position,
        )


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the runs' wall-clock time; they add up to 1."""

    draft: float
    verify: float
    """Target passes, those over prompts included, and verdicts."""
    other: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The terms of τ/(γ·c + v), measured in the same runs (see `bench.engine.steps`), and the predicted speedup."""

    target_step_s: float
    gamma: float
    c: float | None
    v: float
    predicted_speedup: float
    efficiency: float | None
    """Measured speedup of whole requests, prompts included, over the predicted one."""
    decode_efficiency: float | None
    """The same for the time after the first token alone."""
    num_steps: int
    num_unmatched_steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose text differed from the text without speculation."""

    where: str
    task: str
    token: int
    """Position of the first differing token, from 0."""
    num_times: int
    """Repeats in which it differed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Texts compared with those without speculation, of the same repeat, token by token."""

    num_compared: int
    num_identical: int
    first_differing_token: int | None
    """The smallest position over all texts."""
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One configuration at one concurrency on one task, or on all of them."""

    configuration: str
    concurrency: int
    task: str | None
    """None for all tasks together."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_s: float | None
    """Output tokens over wall-clock time, each batch at the median of its repeats."""
    speedup: float | None
    """`tokens_per_s` over that of speculation off, on the same batches; for all tasks the geometric mean over tasks."""
    speedup_interval: Interval | None
    num_pairs: int | None
    """Number of pairs with speculation off: prompts, or batches where several requests run at once."""
    pooled_speedup: float | None
    """As `speedup`, but pooled over all tasks: long answers weigh more."""
    decode_speedup: float | None
    """Speedup of decoding: seconds a token after the first, off's over the configuration's."""
    acceptance: PooledAcceptance
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    """(latency − time to first token) / (tokens − 1), a request."""
    latency_s: Percentiles | None
    time_shares: TimeShares | None
    prediction: Prediction | None
    identity: Identity | None
    """None for speculation off."""
    num_in_flight: float | None
    """Mean number of running requests."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The fastest configuration compared with another one, at one concurrency, over all tasks."""

    configuration: str
    other: str
    concurrency: int
    speedup: float
    """As `EngineFigures.speedup`, with `other` in the place of speculation off."""
    speedup_interval: Interval | None


@dataclass(frozen=True, slots=True)
class ConfigurationSummary:
    """A configuration with its options, defaults included, and its planned memory."""

    name: str
    method: str
    verifier: str
    reproducible: bool
    """The verifier gives the same text with and without drafts, if it was sampled too."""
    options: dict[str, Any]
    draft_bytes: int | None
    kv_bytes: int | None


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """The workload of a benchmark."""

    source: str
    num_prompts: dict[str, int]
    """By task."""
    max_tokens: int | None
    """None: the lengths in the data."""
    num_unusable: int
    num_too_long: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed batch: the raw data for other statistics."""

    configuration: str
    concurrency: int
    repeat: int
    batch: int
    wall_s: float
    prompts: list[int]
    num_output_tokens: list[int]
    time_to_first_token_s: list[float]
    latency_s: list[float]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A benchmark of configurations on engines in this process."""

    schema: int
    kind: str
    complete: bool
    """False when it was interrupted: the figures are of the runs that were made until then."""
    provenance: dict[str, Any]
    model: str
    labels: list[str]
    """Notes that must accompany these results."""
    workload: WorkloadSummary
    sampling: dict[str, Any]
    repeats: int
    interleaved_by: str
    """`batch`, or `round` where memory has room for one engine at a time."""
    target_bytes: int | None
    """Weights of the target, which configurations share when their engines are in memory together."""
    peak_rss_bytes: int | None
    """Peak resident memory of this process: Python and libraries, weights, keys and values of all engines in memory,
    activations."""
    peak_device_bytes: int | None
    """Peak GPU memory of PyTorch; None on a CPU."""
    configurations: list[ConfigurationSummary]
    figures: list[EngineFigures]
    comparisons: list[Comparison]
    """At each concurrency, the fastest configuration against the others, fastest first."""
    timings: list[Timing]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)

    def of(self, configuration: str, concurrency: int, task: str | None = None) -> EngineFigures | None:
        """The figures of one cell of the benchmark; None where it was not measured."""
        key = (configuration, concurrency, task)
        found = (f for f in self.figures if (f.configuration, f.concurrency, f.task) == key)
        return next(found, None)

    @property
    def concurrencies(self) -> list[int]:
        return list(dict.fromkeys(figures.concurrency for figures in self.figures))

    @property
    def tasks(self) -> list[str]:
        return list(self.workload.num_prompts)


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Growth of the server's own counters, and rates from it; None for what it does not expose."""

    num_drafts: int | None
    num_output_tokens: int | None
    num_prompt_tokens: int | None
    num_requests: int | None
    acceptance: PooledAcceptance | None
    """Acceptance over steps with drafts only; `slipstream.tools.bench.server.counters` says what the rates mean."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """A server at one concurrency, measured by its clients. Tokens and times are of complete answers."""

    concurrency: int
    task: str | None
    num_requests: int
    """Number of complete answers."""
    num_failed: int
    errors: dict[str, int]
    """Message to its number of occurrences."""
    num_prompt_tokens: int | None
    """From `usage`; None where some answer lacks it."""
    num_output_tokens: int | None
    num_chunks: int
    tokens_per_s: float | None
    requests_per_s: float | None
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    """(latency − time to first token) / (tokens − 1), a request."""
    inter_token_latency_s: Percentiles | None
    """Times between streamed pieces; a step with accepted draft tokens streams several tokens as one piece."""
    latency_s: Percentiles | None
    server: ServerCounts | None
    """None for single tasks, and where the server's metrics could not be read."""
    disagreements: list[str]
    """Differences between the client's and the server's counts, as messages."""


@dataclass(frozen=True, slots=True)
class ServerResult:
    """A benchmark of a server."""

    schema: int
    kind: str
    complete: bool
    provenance: dict[str, Any]
    url: str
    model: str
    metrics: str
    """Where the server's counters came from, or why there are none."""
    workload: WorkloadSummary
    sampling: dict[str, Any]
    repeats: int
    figures: list[ServerFigures]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)
