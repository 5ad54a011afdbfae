"""The text that `/metrics` gives: constant labels, and vLLM's names where they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slipstream.serve.metrics.vllm_metrics import AS_VLLM, ONCE_AT_VLLM, PREFIX, VLLM_PREFIX


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
