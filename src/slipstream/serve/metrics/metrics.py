"""Every metric of the server, from the engine's reports on steps and requests.

Prometheus text with the prefix `slipstream_`; metrics that vLLM has too use its names after the prefix, and can
also be shown under vLLM's own names. Tokens and drafts are counted in the engine's step, so aborted answers are
included.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import repeat, zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slipstream.control.monitor.alarms import AlarmKind
from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.request import add_to_first
from slipstream.core.metrics.step import StepReport
from slipstream.core.types import FinishReason
from slipstream.engine.outputs import Update
from slipstream.sampling.params import SamplingParams
from slipstream.serve.api.task_labels import TaskLabels
from slipstream.serve.dashboard.latency import LATENCIES, BucketCounts
from slipstream.serve.facts import EngineFacts
from slipstream.serve.metrics.alarm_metrics import AlarmMetrics
from slipstream.serve.metrics.repeated import RepeatedHistogram
from slipstream.serve.metrics.vllm_metrics import AS_VLLM, ONCE_AT_VLLM, PREFIX, VLLM_PREFIX
from slipstream.serve.metrics.worker_metrics import WorkerMetrics

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

_STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504)
"""Statuses whose counters exist from the start: PromQL's `increase` and `rate` miss the first event of a series that
begins with it."""


class Metrics:
    """One server's registry. Counting is safe from the engine's thread and the event loop alike."""

    def __init__(self, model_name: str, task_label: TaskLabels, alias: str | None) -> None:
        self.task_label = task_label
        self._by_task: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self._by_position: list[tuple[Counter, Counter]] = []
        self._registry = registry = CollectorRegistry()
        self._exposed = CollectorRegistry()
        self._exposed.register(_Labelled(registry, {"model_name": model_name}, with_vllm=alias == "vllm"))

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help_, labels, registry=registry)

        def histogram(name: str, help_: str, buckets: Seq[float]) -> RepeatedHistogram:
            return RepeatedHistogram(PREFIX + name, help_, buckets=buckets, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(PREFIX + name, help_, registry=registry)

        spec = "spec_decode_"
        self._drafts = counter(spec + "num_drafts", "Steps in which a sequence's draft was checked.")
        self._drafted = counter(spec + "num_draft_tokens", "Draft tokens that were checked.")
        self._accepted = counter(spec + "num_accepted_tokens", "Draft tokens that were accepted and emitted.")
        self._wasted = counter(spec + "num_wasted_tokens", "Draft tokens that were checked and rejected.")
        self._drafted_at = counter(
            spec + "num_draft_tokens_per_pos", "Drafts with a token at this position, from 0.", "position"
        )
        self._accepted_at = counter(
            spec + "num_accepted_tokens_per_pos",
            "Draft tokens accepted at this position, from 0.",
            "position",
        )
        self._length = histogram(
            spec + "accepted_length", "Draft tokens accepted in a step of a sequence with a draft.", _LENGTHS
        )
        by_task = ("task", "method")
        self._task_steps = counter("task_steps", "Target passes that produced tokens, by task.", *by_task)
        self._task_drafted = counter(
            "task_draft_tokens", "Draft tokens that were checked, by task.", *by_task
        )
        self._task_accepted = counter("task_accepted_tokens", "Accepted draft tokens, by task.", *by_task)
        self._task_output = counter("task_generation_tokens", "Output tokens, by task.", *by_task)

        self._lossy = counter("lossy_requests", "Finished requests that asked for step-level speculation.")
        self._drafted_steps = counter(
            "reasoning_drafted_steps", "Steps of thinking for which a draft wrote something."
        )
        self._kept_steps = counter("reasoning_kept_steps", "Drafted steps that the judge kept.")
        self._lossy_tokens = counter(
            "lossy_tokens", "Draft tokens in kept steps: output that is not the target's own."
        )
        self._draft_s = counter("draft_seconds", "Time spent drafting.")
        self._verify_s = counter(
            "verify_seconds", "Time spent in target passes and verification, prompts included."
        )
        self._other_s = counter("other_seconds", "Time spent in the rest of the steps.")
        self._steps = counter("engine_steps", "Steps of the engine, each for all running answers.")
        self._rows = histogram(
            "iteration_tokens_total", "Tokens computed by a step, without draft tokens.", _ROWS
        )

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers that have begun.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up for reuse.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were reused.")
        self._preemptions = counter(
            "num_preemptions", "Preemptions: the cache was full, or another was due a place."
        )
        self._ends = counter("request_success", "Answers that ended, by reason.", "finished_reason")
        for reason in FinishReason:
            self._ends.labels(str(reason))
        self._responses = counter("http_responses", "HTTP responses of the API's paths, by status.", "status")
        for status in _STATUSES:
            self._responses.labels(status)

        self._restarts = counter("engine_restarts", "How often the engine's process was started again.")
        self._num_restarts = 0
        self._connections = gauge("connections", "Open connections.")
        self._closed = counter(
            "closed_connections",
            "Connections closed by the server before their client did, by reason.",
            "reason",
        )

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S)
        self._itl = histogram(
            "inter_token_latency_seconds", "Between tokens; a chunk's gap is shared by its tokens.", _GAP_S
        )
        self._icl = histogram("inter_chunk_latency_seconds", "Between chunks of an answer.", _GAP_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _REQUEST_S)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "(Latency - first token) / (tokens - 1).", _GAP_S
        )

        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self._inference = histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _REQUEST_S
        )
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._answer_length = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", _TOKENS
        )
        self._n = histogram("request_params_n", "Answers that a request asked for.", (1, 2, 5, 10, 20))
        self._max_tokens = histogram("request_params_max_tokens", "The max_tokens of a request.", _TOKENS)

        self._running = gauge("num_requests_running", "Answers that are running.")
        self._waiting = gauge("num_requests_waiting", "Answers that are waiting.")
        self._paused = gauge("num_requests_paused", "Answers that make no tokens until their clients read.")
        self._kv_usage = gauge(
            "kv_cache_usage_perc", "Share of the cache that running answers hold; 1 is all of it."
        )

        self._draft_workers = WorkerMetrics(registry)
        self.alarms = AlarmMetrics(registry, task_label)
        self.alarms.expect(AlarmKind.TOKEN_MISMATCH, None, None)

    def register(self, collector: Collector) -> None:
        """Add the metrics of `collector`; their names have no prefix."""
        self._registry.register(collector)

    def describe_cache(self, facts: EngineFacts) -> None:
        """Show the size and settings of the cache in the labels of a gauge that is always 1, as vLLM does."""
        labels = {
            "block_size": "1",  # a slot holds one token
            "num_gpu_blocks": str(facts.num_slots),
            "kv_cache_size_tokens": str(facts.num_slots),
            "kv_cache_memory_bytes": str(facts.kv_bytes),
            "cache_dtype": facts.cache_dtype,
            "enable_prefix_caching": str(facts.prefix_caching),
        }
        about = "Size and settings of the cache, in the labels; always 1."
        Gauge(PREFIX + "cache_config_info", about, labels, registry=self._registry).labels(**labels).set(1)

    # --- of the engine's steps ---------------------------------------------------------------------------------

    def on_step(self, step: StepReport) -> None:
        """Count a step's time."""
        self._steps.inc()
        self._draft_s.inc(step.draft_s)
        self._verify_s.inc(step.verify_s)
        self._other_s.inc(max(step.other_s, 0.0))
        self._rows.observe(step.num_rows)

    def on_rows(self, rows: Seq[DecodedRow]) -> None:
        """Count a step's draft, accepted and emitted tokens, added up first: every counter takes a lock."""
        self.on_repeated_rows(zip(rows, repeat(1)))
        self.on_prompts(
            sum(row.num_prompt_tokens for row in rows), sum(row.num_cached_tokens for row in rows)
        )

    def on_prompts(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens of prompts, and those of them that were reused."""
        if num_tokens:
            self._prompt_tokens.inc(num_tokens)
            self._queries.inc(num_tokens)
            self._hits.inc(num_cached)

    def on_repeated_rows(self, rows: Iterable[tuple[DecodedRow, int]]) -> None:
        """As `on_rows`, each row as often as its number says; the tokens of prompts are told by `on_prompts`."""
        emitted = num_drafts = drafted = accepted = 0
        drafted_at: list[int] = []
        accepted_at: list[int] = []
        tasks: dict[tuple[str, str], list[int]] = {}
        for row, times in rows:
            emitted += row.num_emitted * times
            if row.num_drafted:
                num_drafts += times
                drafted += row.num_drafted * times
                accepted += row.num_accepted * times
                self._length.observe_times(row.num_accepted, times)
                add_to_first(drafted_at, row.draft_depth, times)
                add_to_first(accepted_at, row.num_accepted, times)
            counted = tasks.setdefault((self.task_label(row.task), row.method), [0, 0, 0, 0])
            for i, number in enumerate((1, row.num_drafted, row.num_accepted, row.num_emitted)):
                counted[i] += number * times
        self._output_tokens.inc(emitted)
        for labels, counted in tasks.items():
            for counter, number in zip(self._task_counters(labels), counted, strict=True):
                counter.inc(number)
        if num_drafts:
            self._drafts.inc(num_drafts)
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            self._wasted.inc(drafted - accepted)
            for position, numbers in enumerate(zip_longest(drafted_at, accepted_at, fillvalue=0)):
                for counter, number in zip(self._position_counters(position), numbers, strict=True):
                    counter.inc(number)

    def _task_counters(self, labels: tuple[str, str]) -> tuple[Counter, ...]:
        """Counters of passes, and of draft, accepted and emitted tokens of a task and drafter; cached, since
        looking up labels is slow."""
        if labels not in self._by_task:
            counters = (self._task_steps, self._task_drafted, self._task_accepted, self._task_output)
            self._by_task[labels] = tuple(counter.labels(*labels) for counter in counters)
        return self._by_task[labels]

    def _position_counters(self, position: int) -> tuple[Counter, ...]:
        """Counters of draft and accepted tokens at a depth, from 0."""
        while len(self._by_position) <= position:
            number = len(self._by_position)
            self._by_position.append((self._drafted_at.labels(number), self._accepted_at.labels(number)))
        return self._by_position[position]

    # --- in the event loop --------------------------------------------------------------------------------------

    def clock(self, num_answers: int, params: SamplingParams) -> RequestClock:
        """A clock for one request's updates."""
        return RequestClock(self, num_answers, params)

    def on_chunk(self, gap_s: float, num_tokens: int) -> None:
        """Time the tokens of an update that was not an answer's first."""
        self._icl.observe(gap_s)
        for _ in range(num_tokens):
            self._itl.observe(gap_s / num_tokens)

    def on_end(self, update: Update, params: SamplingParams) -> None:
        """Count an answer's end, and the request's times and lengths when it was the last one."""
        self._ends.labels(str(update.finish_reason)).inc()
        if update.output is None:
            return
        metrics = update.output.metrics
        self._ttft.observe(metrics.time_to_first_token_s)
        if metrics.lossy:
            self._lossy.inc()
            self._drafted_steps.inc(metrics.num_drafted_steps)
            self._kept_steps.inc(metrics.num_kept_steps)
            self._lossy_tokens.inc(metrics.num_lossy_tokens)
        self._e2e.observe(metrics.total_s)
        queue_s = min(
            answer.metrics.queue_s for answer in update.output.outputs
        )  # the other answers wait for the first one's prompt
        self._queue.observe(queue_s)
        self._preemptions.inc(metrics.num_preemptions)
        self._prefill.observe(max(metrics.time_to_first_token_s - queue_s, 0.0))
        self._decode.observe(max(metrics.total_s - metrics.time_to_first_token_s, 0.0))
        self._inference.observe(max(metrics.total_s - queue_s, 0.0))
        self._prompt_length.observe(len(update.output.prompt_token_ids))
        lengths = [answer.metrics.num_output_tokens for answer in update.output.outputs]
        self._longest.observe(max(lengths))
        self._n.observe(params.n)
        self._max_tokens.observe(params.max_tokens or 0)
        for length in lengths:
            self._answer_length.observe(length)
        for answer in update.output.outputs:
            if answer.metrics.num_new_tokens > 1:
                rest_s = answer.metrics.total_s - answer.metrics.time_to_first_token_s
                self._tpot.observe(rest_s / (answer.metrics.num_new_tokens - 1))

    def on_abort(self, num_answers: int) -> None:
        """Count aborted answers."""
        self._ends.labels(str(FinishReason.ABORT)).inc(num_answers)

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

    def latencies(self) -> dict[str, BucketCounts]:
        """The histograms of `LATENCIES` at this moment, by what the dashboard calls them."""
        histograms = (self._ttft, self._itl, self._e2e, self._queue)
        return {
            name: BucketCounts.of(
                {
                    float(sample.labels["le"]): sample.value
                    for family in histogram.collect()
                    for sample in family.samples
                    if sample.name.endswith("_bucket")
                }
            )
            for name, histogram in zip(LATENCIES, histograms, strict=True)
        }

    def on_stats(self, stats: EngineStats) -> None:
        """Set the gauges of the queue and the cache, and what is known of draft workers."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._paused.set(stats.num_paused)
        self._kv_usage.set(stats.cache_usage)
        self._draft_workers.on_stats(stats.draft_workers)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._exposed)


class RequestClock:
    """One request's clock."""

    def __init__(self, metrics: Metrics, num_answers: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._unfinished = num_answers
        self._last_s: dict[tuple[int, int], float] = {}

    def add(self, prompt: int, update: Update) -> None:
        """Time an update, and count the end of an answer."""
        if update.token_ids:
            now_s = time.perf_counter()
            last_s = self._last_s.get((prompt, update.index))
            if last_s is not None:
                self._metrics.on_chunk(now_s - last_s, len(update.token_ids))
            self._last_s[prompt, update.index] = now_s
        if update.finish_reason is not None:
            self._unfinished -= 1
            self._metrics.on_end(update, self._params)

    def refuse(self) -> None:
        """The engine refused the request: none of its answers began."""
        self._unfinished = 0

    def close(self) -> None:
        """The request is over; answers without an end were aborted."""
        if self._unfinished:
            self._metrics.on_abort(self._unfinished)


class _Labelled(Collector):
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
