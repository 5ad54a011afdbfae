"""Every metric of the server, from the engine's reports on steps and requests.

Prometheus text with the prefix `slipstream_`; metrics that vLLM has too use its names after the prefix, and can
also be shown under vLLM's own names. Tokens and drafts are counted in the engine's step, so aborted answers are
included.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from slipstream.control.monitor.alarms import AlarmKind
from slipstream.core.metrics.engine import EngineStats
from slipstream.sampling.params import SamplingParams
from slipstream.serve.accounts import TaskLabels
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.metrics.alarm_metrics import AlarmMetrics
from slipstream.serve.metrics.answer_metrics import AnswerMetrics, RequestClock
from slipstream.serve.metrics.instruments import Instruments
from slipstream.serve.metrics.pass_metrics import PassMetrics
from slipstream.serve.metrics.step_metrics import StepMetrics
from slipstream.serve.metrics.vllm_metrics import LabelledMetrics
from slipstream.serve.metrics.worker_metrics import WorkerMetrics

_STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504)
"""Statuses whose counters exist from the start: PromQL's `increase` and `rate` miss the first event of a series that
begins with it."""


class Metrics:
    """One server's registry. Counting is safe from the engine's thread and the event loop alike."""

    def __init__(self, model_name: str, task_label: TaskLabels, alias: str | None) -> None:
        self.task_label = task_label
        self._registry = CollectorRegistry()
        self._exposed = CollectorRegistry()
        self._exposed.register(
            LabelledMetrics(self._registry, {"model_name": model_name}, with_vllm=alias == "vllm")
        )
        self._new = new = Instruments(self._registry)
        self.steps = StepMetrics(new, task_label)
        self.answers = AnswerMetrics(new)
        self._responses = new.counter(
            "http_responses", "HTTP responses of the API's paths, by status.", "status"
        )
        for status in _STATUSES:
            self._responses.labels(status)
        self._restarts = new.counter("engine_restarts", "How often the engine's process was started again.")
        self._num_restarts = 0
        self._connections = new.gauge("connections", "Open connections.")
        self._closed = new.counter(
            "closed_connections",
            "Connections closed by the server before their client did, by reason.",
            "reason",
        )
        self._running = new.gauge("num_requests_running", "Answers that are running.")
        self._waiting = new.gauge("num_requests_waiting", "Answers that are waiting.")
        self._paused = new.gauge(
            "num_requests_paused", "Answers that make no tokens until their clients read."
        )
        self._kv_usage = new.gauge(
            "kv_cache_usage_perc", "Share of the cache that running answers hold; 1 is all of it."
        )
        self._draft_workers = WorkerMetrics(new)
        self._passes = PassMetrics(new)
        self.alarms = AlarmMetrics(new, task_label)
        self.alarms.expect(AlarmKind.TOKEN_MISMATCH, None, None)

    def register(self, collector: Collector) -> None:
        """Add the metrics of `collector`; their names have no prefix."""
        self._registry.register(collector)

    def describe_cache(self, info: EngineInfo) -> None:
        """Show the size and settings of the cache in the labels of a gauge that is always 1, as vLLM does."""
        labels = {
            "block_size": "1",  # a slot holds one token
            "num_gpu_blocks": str(info.num_slots),
            "kv_cache_size_tokens": str(info.num_slots),
            "kv_cache_memory_bytes": str(info.kv_bytes),
            "cache_dtype": info.cache_dtype,
            "enable_prefix_caching": str(info.prefix_caching),
        }
        about = "Size and settings of the cache, in the labels; always 1."
        self._new.gauge("cache_config_info", about, *labels).labels(**labels).set(1)

    def clock(self, num_answers: int, params: SamplingParams) -> RequestClock:
        """A clock for one request's updates."""
        return RequestClock(self.answers, num_answers, params)

    def on_response(self, status: int) -> None:
        """Count a response of the API."""
        self._responses.labels(status).inc()

    def set_restarts(self, num: int) -> None:
        """Set how often the engine's process was started again, which only grows."""
        self._restarts.inc(num - self._num_restarts)
        self._num_restarts = num

    def set_connections(self, num: int) -> None:
        """Set the number of open connections."""
        self._connections.set(num)

    def on_closed_connection(self, reason: str, num: int = 1) -> None:
        """Count connections that the server closed; 0 makes the reason's series exist."""
        self._closed.labels(reason).inc(num)

    def on_stats(self, stats: EngineStats) -> None:
        """Set the gauges of the queue and the cache, and what is known of draft workers and of recorded passes."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._paused.set(stats.num_paused)
        self._kv_usage.set(stats.cache_usage)
        self._draft_workers.on_stats(stats.draft_workers)
        self._passes.on_stats(stats.passes)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._exposed)
