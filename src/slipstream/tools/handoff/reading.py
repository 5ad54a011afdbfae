"""vLLM's Prometheus metrics at one moment, and their growth between two."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from slipstream.errors import RemoteError
from slipstream.serve.dashboard.latency import LATENCIES, BucketCounts, bucket_counts
from slipstream.serve.metrics.vllm_metrics import VLLM_PREFIX

_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "num_prompt_tokens": "prompt_tokens",
    "num_output_tokens": "generation_tokens",
    "num_cache_queries": "prefix_cache_queries",
    "num_cache_hits": "prefix_cache_hits",
    "num_preemptions": "num_preemptions",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_ENDED = "request_success"
_STEPS = "iteration_tokens_total"
_LENGTH = "length"
"""The finished reason of an answer that was cut off."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """vLLM's counters, or their growth. All engines of one server are added up; what is not exposed is 0."""

    num_drafts: int = 0
    """Steps of a sequence that checked a draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    """Steps of the engine, each for all running requests."""
    accepted_at: tuple[int, ...] = ()
    """Accepted draft tokens by position, from 0."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Finished requests by reason."""

    @property
    def num_ended(self) -> int:
        return sum(self.ended.values())

    @property
    def num_cut(self) -> int:
        """Answers that ended by length."""
        return self.ended.get(_LENGTH, 0)

    @property
    def reached_at(self) -> tuple[int, ...]:
        """How often each position was checked below an accepted path: of chains, as often as the one before was
        accepted. The counters do not tell the depth of each draft, so of drafts of varying depth it is too high, and
        the conditional acceptance at a position a lower bound."""
        return (
            tuple(number for number in (self.num_drafts, *self.accepted_at[:-1]) if number)
            if self.accepted_at
            else ()
        )

    @property
    def acceptance_length(self) -> float | None:
        """τ as vLLM logs it: 1 + accepted tokens over drafts; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """α: accepted over draft tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def since(self, earlier: EngineCounts) -> EngineCounts | None:
        """The growth since an earlier reading; None where a counter fell, as when the server was restarted."""
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        accepted_at = tuple(
            now - then for now, then in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)
        )
        ended = {reason: count - earlier.ended.get(reason, 0) for reason, count in self.ended.items()}
        if any(count < 0 for count in (*grown.values(), *accepted_at, *ended.values())):
            return None
        return EngineCounts(**grown, accepted_at=accepted_at, ended=ended)


_NUMBERS = tuple(each.name for each in fields(EngineCounts) if each.name not in ("accepted_at", "ended"))


def added(parts: Iterable[EngineCounts]) -> EngineCounts:
    """The sums."""
    parts = list(parts)
    ended: dict[str, int] = defaultdict(int)
    for part in parts:
        for reason, count in part.ended.items():
            ended[reason] += count
    return EngineCounts(
        **{name: sum(getattr(part, name) for part in parts) for name in _NUMBERS},
        accepted_at=tuple(map(sum, zip_longest(*(part.accepted_at for part in parts), fillvalue=0))),
        ended=dict(ended),
    )


@dataclass(frozen=True, slots=True)
class VllmReading:
    """One reading of `/metrics`."""

    time_s: float
    """On the clock of `time.monotonic`."""
    model: str
    """The label `model_name`; '' where no sample has one."""
    counts: EngineCounts
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the cache that is in use: of several engines the fullest."""
    latencies: Mapping[str, BucketCounts]
    """By the names of `LATENCIES`."""
    families: tuple[Metric, ...] = field(repr=False, compare=False, default=())
    """vLLM's families, as parsed."""


def parse_reading(text: str, time_s: float | None = None) -> VllmReading:
    """From Prometheus text. Raises `RemoteError` for text in another format, or without vLLM's names."""
    try:
        families = [
            family for family in text_string_to_metric_families(text) if family.name.startswith(VLLM_PREFIX)
        ]
        if not families:
            raise RemoteError("its metrics have no names that begin with 'vllm:', so it is no vLLM")
        return _reading(families, time.monotonic() if time_s is None else time_s)
    except (ValueError, KeyError, OverflowError) as error:
        raise RemoteError(f"its metrics are not in Prometheus' text format: {error}") from None


def _reading(families: list[Metric], time_s: float) -> VllmReading:
    sums: dict[str, float] = defaultdict(float)
    most: dict[str, float] = {}
    accepted_at: dict[int, float] = defaultdict(float)
    ended: dict[str, int] = {}
    buckets: dict[str, list[tuple[float, float]]] = defaultdict(list)
    model = ""
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(VLLM_PREFIX)
            bare = name if name.startswith(_STEPS) else name.removesuffix("_total")
            model = model or sample.labels.get("model_name", "")
            if bare == _PER_POSITION:
                accepted_at[int(sample.labels["position"])] += sample.value
            elif bare == _ENDED:
                reason = sample.labels.get("finished_reason", "")
                ended[reason] = ended.get(reason, 0) + int(sample.value)
            elif name.endswith("_bucket"):
                buckets[name.removesuffix("_bucket")].append((float(sample.labels["le"]), sample.value))
            elif not name.endswith("_created"):
                sums[bare] += sample.value
                most[bare] = max(most.get(bare, sample.value), sample.value)
    counts = EngineCounts(
        **{key: int(sums[name]) for key, name in _COUNTERS.items() if name in sums},
        num_steps=int(sums.get(f"{_STEPS}_count", 0)),
        accepted_at=tuple(int(accepted_at[i]) for i in range(max(accepted_at, default=-1) + 1)),
        ended=ended,
    )
    return VllmReading(
        time_s=time_s,
        model=model,
        counts=counts,
        num_running=int(sums.get("num_requests_running", 0)),
        num_waiting=int(sums.get("num_requests_waiting", 0)),
        kv_usage=most.get("kv_cache_usage_perc", most.get("gpu_cache_usage_perc", 0.0)),
        latencies={
            shown: bucket_counts(buckets[name]) for shown, name in LATENCIES.items() if name in buckets
        },
        families=tuple(families),
    )
