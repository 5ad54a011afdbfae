"""What a benchmark reports. Names end in their units; a figure for which there is no data is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.bench.statistics import Interval, Percentiles

EMBEDDED = "embedded pair"
"""The model's name where none was given."""
SCHEMA = 1
"""Raised when a field of the JSON changes its meaning."""


@dataclass(frozen=True, slots=True)
class PooledAcceptance:
    """What became of the draft tokens, pooled over all requests."""

    num_steps: int
    """Target passes that yielded tokens, a sequence at a time."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_wasted_tokens: int
    """Drafted and checked, but not accepted."""
    rate: float | None
    """α, pooled: accepted over drafted."""
    conditional: list[float]
    """α by position: entry i is accepted at i + 1 over the steps that reached and proposed it."""
    length: float | None
    """τ: tokens a target pass."""
    reached_per_position: list[int]
    """Entry i: steps that proposed position i + 1 below an accepted path."""
    accepted_per_position: list[int]


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Of the wall-clock time of the runs; they add up to 1."""

    draft: float
    verify: float
    """Target passes, those over prompts included, and verdicts."""
    other: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The terms of τ/(γ·c + v), measured in the same runs as `bench.engine.steps` says, and what they predict."""

    target_step_s: float
    gamma: float
    c: float | None
    v: float
    predicted_speedup: float
    efficiency: float | None
    """Measured speedup, prompts and all else included, over the predicted one."""
    decode_efficiency: float | None
    """The same for the time after the first token alone."""
    num_steps: int
    num_unmatched_steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose text was not the one without speculation."""

    where: str
    task: str
    token: int
    """Position of the first differing token, from 0."""
    num_times: int
    """Repeats in which it differed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Texts against the texts without speculation, of the same repeat, token by token."""

    num_compared: int
    num_identical: int
    first_differing_token: int | None
    """The earliest of all."""
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class Figures:
    """One configuration at one concurrency on one task, or on all of them."""

    configuration: str
    concurrency: int
    task: str | None
    """None for all tasks together."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_s: float | None
    """All output tokens over all time, each batch at the median of its repeats."""
    speedup: float | None
    """`tokens_per_s` over that of speculation off, on the same batches; over all tasks the geometric mean of theirs."""
    speedup_interval: Interval | None
    num_pairs: int | None
    """What was compared with speculation off: prompts, or batches where several requests run at once."""
    pooled_speedup: float | None
    """As `speedup`, but over all tasks pooled: long answers weigh more."""
    decode_speedup: float | None
    """Seconds a token after the first one: off's over the configuration's."""
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
    """Mean number of requests under way."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The configuration with the highest speedup against another one, at one concurrency, over all tasks."""

    configuration: str
    other: str
    concurrency: int
    speedup: float
    """As `Figures.speedup`, with `other` in the place of speculation off."""
    speedup_interval: Interval | None


@dataclass(frozen=True, slots=True)
class ConfigurationFacts:
    """What a configuration is, the defaults included, and what it planned to hold in memory."""

    name: str
    method: str
    verifier: str
    reproducible: bool
    """The verifier gives the same text with and without drafts, if it was sampled too."""
    options: dict[str, Any]
    draft_bytes: int | None
    kv_bytes: int | None


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What was asked."""

    source: str
    num_prompts: dict[str, int]
    """By task."""
    max_tokens: int | None
    """None: lengths came from the data."""
    num_unusable: int
    num_too_long: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed batch, for those who want other statistics than ours."""

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
    """A benchmark of configurations on engines of our own."""

    schema: int
    kind: str
    complete: bool
    """False when it was interrupted: the figures are of the runs that were made until then."""
    provenance: dict[str, Any]
    model: str
    labels: list[str]
    """What must be said beside these results."""
    workload: WorkloadFacts
    sampling: dict[str, Any]
    repeats: int
    interleaved_by: str
    """`batch`, or `round` where memory holds one engine at a time."""
    target_bytes: int | None
    """Weights of the target, which side by side all configurations share."""
    peak_rss_bytes: int | None
    """The most main memory that this process ever held: Python and libraries, weights, keys and values of all engines
    that were held at once, activations."""
    peak_device_bytes: int | None
    """The most GPU memory that PyTorch held; None on a CPU."""
    configurations: list[ConfigurationFacts]
    figures: list[Figures]
    comparisons: list[Comparison]
    """At each concurrency, the fastest configuration against the others, in the order of their speed."""
    timings: list[Timing]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)

    def of(self, configuration: str, concurrency: int, task: str | None = None) -> Figures | None:
        """The figures of one cell of the benchmark; None where nothing was measured."""
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
    """What the server's own counters grew by, and what follows; None for what it does not expose."""

    num_drafts: int | None
    num_output_tokens: int | None
    num_prompt_tokens: int | None
    num_requests: int | None
    acceptance: PooledAcceptance | None
    """Here a step is one that drafted; `slipstream.bench.server.counters` says what the rates then mean."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """A server at one concurrency, seen by its clients. Tokens and times are of answers that came to their end."""

    concurrency: int
    task: str | None
    num_requests: int
    """Answered to the end."""
    num_failed: int
    errors: dict[str, int]
    """Message to how often it came."""
    num_prompt_tokens: int | None
    """As `usage` says; None where some answer came without."""
    num_output_tokens: int | None
    num_chunks: int
    tokens_per_s: float | None
    requests_per_s: float | None
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    """(latency − time to first token) / (tokens − 1), a request."""
    inter_token_latency_s: Percentiles | None
    """Between one streamed piece and the next; a step of speculation streams several tokens as one piece."""
    latency_s: Percentiles | None
    server: ServerCounts | None
    """None by task, and where the server's metrics could not be had."""
    disagreements: list[str]
    """Where client and server count differently."""


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
    workload: WorkloadFacts
    sampling: dict[str, Any]
    repeats: int
    figures: list[ServerFigures]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""
        return asdict(self)
