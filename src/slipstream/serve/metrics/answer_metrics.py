"""Metrics of requests: how they ended, how long they and their parts took, how long they were."""

from __future__ import annotations

import time

from slipstream.core.request import FinishReason
from slipstream.engine.outputs import Update
from slipstream.sampling.params import SamplingParams
from slipstream.serve.dashboard.latency import LATENCIES, BucketCounts
from slipstream.serve.metrics.instruments import Instruments

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))


class AnswerMetrics:
    """Counts what became of requests. Used in the event loop."""

    def __init__(self, new: Instruments) -> None:
        self._ttft = new.histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S)
        self._itl = new.histogram(
            "inter_token_latency_seconds", "Between tokens; a chunk's gap is shared by its tokens.", _GAP_S
        )
        self._icl = new.histogram("inter_chunk_latency_seconds", "Between chunks of an answer.", _GAP_S)
        self._e2e = new.histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self._queue = new.histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST_S
        )
        self._tpot = new.histogram(
            "request_time_per_output_token_seconds", "(Latency - first token) / (tokens - 1).", _GAP_S
        )
        self._prefill = new.histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_S
        )
        self._decode = new.histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self._inference = new.histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _REQUEST_S
        )
        self._declare_sizes(new)
        self._lossy = new.counter(
            "lossy_requests", "Finished requests that asked for step-level speculation."
        )
        self._drafted_steps = new.counter(
            "reasoning_drafted_steps", "Steps of thinking for which a draft wrote something."
        )
        self._kept_steps = new.counter("reasoning_kept_steps", "Drafted steps that the judge kept.")
        self._lossy_tokens = new.counter(
            "lossy_tokens", "Draft tokens in kept steps: output that is not the target's own."
        )

    def _declare_sizes(self, new: Instruments) -> None:
        self._prompt_length = new.histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._answer_length = new.histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._longest = new.histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", _TOKENS
        )
        self._n = new.histogram("request_params_n", "Answers that a request asked for.", (1, 2, 5, 10, 20))
        self._max_tokens = new.histogram("request_params_max_tokens", "The max_tokens of a request.", _TOKENS)
        self._preemptions = new.counter(
            "num_preemptions", "Preemptions: the cache was full, or another was due a place."
        )
        self._ends = new.counter("request_success", "Answers that ended, by reason.", "finished_reason")
        for reason in FinishReason:
            self._ends.labels(str(reason))

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


class RequestClock:
    """One request's clock."""

    def __init__(self, metrics: AnswerMetrics, num_answers: int, params: SamplingParams) -> None:
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
