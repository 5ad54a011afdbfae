"""What `/metrics` gives: the registry with constant labels, and what vLLM has too under its names where requested."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "slipstream_"
VLLM_PREFIX = "vllm:"

AS_VLLM = frozenset(
    {
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("spec_decode_num_accepted_tokens_per_pos", "num_requests_running", "num_requests_waiting"),
        *("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_time_per_output_token_seconds", "iteration_tokens_total", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "cache_config_info"),
    }
)
"""Metrics with the meaning of vLLM's metrics of the same name."""
ONCE_AT_VLLM = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
"""Former names of vLLM's metrics, which older boards query."""


class LabelledMetrics(Collector):
    """A registry's metrics with constant labels, some of them also under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], with_vllm: bool) -> None:
        self._registry = registry
        self._labels = labels
        self._with_vllm = with_vllm

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield self._renamed(metric, PREFIX)
            name = metric.name.removeprefix(PREFIX)
            if self._with_vllm and name in AS_VLLM:
                yield self._renamed(metric, VLLM_PREFIX)
                if name in ONCE_AT_VLLM:
                    yield self._renamed(metric, VLLM_PREFIX, ONCE_AT_VLLM[name])

    def _renamed(self, metric: Metric, prefix: str, once: str | None = None) -> Metric:
        """The metric with another prefix, and under a former name `once` where one is given."""
        own = metric.name.removeprefix(PREFIX)
        renamed = copy.copy(metric)
        renamed.name = prefix + (once or own)
        renamed.samples = [
            Sample(
                renamed.name + sample.name.removeprefix(PREFIX).removeprefix(own),
                {**self._labels, **sample.labels},
                sample.value,
                sample.timestamp,
                sample.exemplar,
            )
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        return renamed
