"""The watch's own `/metrics`: vLLM's under Slipstream's names, and what the watch adds, for the boards of `deploy/`."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slipstream.serve.metrics.control_metrics import ControlMetrics
from slipstream.serve.metrics.vllm_metrics import AS_VLLM, PREFIX, VLLM_PREFIX
from slipstream.tools.handoff.source import VllmSource


class WatchMetrics(Collector):
    """All metrics of one watch."""

    def __init__(self, source: VllmSource) -> None:
        self._source = source
        self._control = ControlMetrics(source.watch.history, str)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        watch = self._source.watch
        labels = {"model_name": watch.server.model}
        reachable = GaugeMetricFamily("server_reachable", "1 while the watched server's metrics can be read.")
        reachable.add_metric([], float(watch.fault is None and watch.pause is None))
        self._control.report = self._source.report()
        for family in (reachable, *self._control.collect()):
            yield _renamed(family, "", PREFIX, labels)
        for family in watch.registry.collect():
            yield _renamed(family, PREFIX, PREFIX, labels)
        if watch.history.last is not None:
            for family in watch.history.last.families:
                if family.name.removeprefix(VLLM_PREFIX) in AS_VLLM:
                    yield _renamed(family, VLLM_PREFIX, PREFIX, {})


def _renamed(family: Metric, old: str, new: str, labels: dict[str, str]) -> Metric:
    """The family with another prefix and further labels."""
    renamed = copy.copy(family)
    renamed.name = new + family.name.removeprefix(old)
    renamed.samples = [
        Sample(
            new + sample.name.removeprefix(old),
            {**labels, **sample.labels},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return renamed
