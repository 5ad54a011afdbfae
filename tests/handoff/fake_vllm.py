"""A stand-in for vLLM's command: `fake_vllm.py --version`, and `serve` with vLLM's paths and names of metrics.

It drafts where it has `--speculative-config`, and takes `--step-s` seconds for a step. Flags that begin with `--fake`
make it misbehave. `POST /fake` with `{"acceptance": 0.2}` changes it while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ("model_name", "engine")


class Metrics:
    """The metrics of vLLM that are read."""

    def __init__(self, model: str, speculates: bool) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self.output = self._counter("generation_tokens")
        self.prompt = self._counter("prompt_tokens")
        self.queries = self._counter("prefix_cache_queries")
        self.running = self._gauge("num_requests_running")
        self.waiting = self._gauge("num_requests_waiting")
        self.usage = self._gauge("kv_cache_usage_perc")
        self.ended = Counter(
            "vllm:request_success", "-", (*LABELS, "finished_reason"), registry=self.registry
        )
        names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
        self.first, self.between, self.whole, self.queue = (
            Histogram(f"vllm:{name}", "-", LABELS, registry=self.registry).labels(**self._labels)
            for name in (*names, "request_queue_time_seconds")
        )
        self.steps = Histogram(
            "vllm:iteration_tokens_total", "-", LABELS, buckets=(1, 8, 64), registry=self.registry
        ).labels(**self._labels)
        if speculates:
            spec = "spec_decode_num_"
            self.drafts, self.drafted = self._counter(spec + "drafts"), self._counter(spec + "draft_tokens")
            self.accepted = self._counter(spec + "accepted_tokens")
            self.accepted_at = Counter(
                f"vllm:{spec}accepted_tokens_per_pos", "-", (*LABELS, "position"), registry=self.registry
            )

    def _counter(self, name: str) -> Any:
        return Counter(f"vllm:{name}", "-", LABELS, registry=self.registry).labels(**self._labels)

    def _gauge(self, name: str) -> Any:
        return Gauge(f"vllm:{name}", "-", LABELS, registry=self.registry).labels(**self._labels)

    def end(self, reason: str) -> None:
        self.ended.labels(**self._labels, finished_reason=reason).inc()

    def accept_at(self, position: int) -> None:
        self.accepted_at.labels(**self._labels, position=str(position)).inc()


class Engine:
    """Makes answers of one letter, with drafts that are accepted by chance."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = json.loads(options.speculative_config or "{}")
        self.depth = int(config.get("num_speculative_tokens", 0))
        self.acceptance = options.fake_acceptance
        self.length_share = 1.0
        self.num_running = self.most_running = 0
        self.metrics = Metrics(options.served_model_name or options.model, self.depth > 0)
        self._rng = random.Random(7)
        self._lock = threading.Lock()

    def answer(self, num_tokens: int) -> tuple[int, str]:
        """(tokens, finish reason) of an answer, counted as vLLM counts."""
        started_s, metrics = time.perf_counter(), self.metrics
        metrics.running.inc()
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        made = 0
        while made < num_tokens:
            time.sleep(self.options.step_s)
            with self._lock:
                accepted = 0
                if self.depth and made:
                    while accepted < self.depth and self._rng.random() < self.acceptance:
                        metrics.accept_at(accepted)
                        accepted += 1
                    metrics.drafts.inc()
                    metrics.drafted.inc(self.depth)
                    metrics.accepted.inc(accepted)
            now_s = time.perf_counter() - started_s
            (metrics.between if made else metrics.first).observe(now_s)
            metrics.steps.observe(1)
            emitted = min(1 + accepted, num_tokens - made)
            metrics.output.inc(emitted)
            made += emitted
        with self._lock:
            self.num_running -= 1
            reason = "length" if self._rng.random() < self.length_share else "stop"
        metrics.running.dec()
        metrics.prompt.inc(7)
        metrics.queries.inc(7)
        metrics.queue.observe(0.001)
        metrics.whole.observe(time.perf_counter() - started_s)
        metrics.end(reason)
        return made, reason


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # else each answer waits 40 ms for the client's acknowledgement of its header
    )
    engine: Engine

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        name = self.engine.options.served_model_name or self.engine.options.model
        if self.path == "/health":
            self._send(200, "")
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": name}]}))
        elif self.path == "/fake":
            self._send(200, json.dumps({"most_running": self.engine.most_running}))
        elif self.path == "/metrics":
            self._send(200, generate_latest(self.engine.metrics.registry).decode(), "text/plain")
        else:
            self._send(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/fake":
            for key, value in body.items():
                setattr(self.engine, key, value)
            if body.get("die"):
                print("RuntimeError: the fake was told to die", flush=True)
                os._exit(3)
            self._send(200, "{}")
            return
        key = os.environ.get("VLLM_API_KEY")
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            self._send(401, json.dumps({"error": "Unauthorized"}))
            return
        num, reason = self.engine.answer(body.get("max_tokens", 16))
        usage = {"prompt_tokens": 7, "completion_tokens": num}
        chat = self.path.endswith("/chat/completions")
        choice = {"index": 0, "finish_reason": reason}
        if not body.get("stream"):
            told = {"message": {"role": "assistant", "content": "a" * num}} if chat else {"text": "a" * num}
            self._send(200, json.dumps({"choices": [choice | told], "usage": usage}))
            return
        told = {"delta": {"content": "a" * num}} if chat else {"text": "a" * num}
        events = [{"choices": [choice | told]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, text, "text/event-stream")

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Clients that go away are part of the tests."""


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print("0.32.0")
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--speculative-config")
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--fake-acceptance", type=float, default=0.7)
    parser.add_argument("--fake-error", help="print this and end before serving")
    parser.add_argument("--fake-silence", action="store_true", help="never serve")
    parser.add_argument("--fake-child", help="start a process that sleeps, and write its id to this file")
    parser.add_argument("--fake-load", type=Path, help="serve once this file is there")
    parser.add_argument("--fake-stubborn", action="store_true", help="ignore SIGTERM")
    options = parser.parse_args()
    print(f"INFO loading {options.model}", flush=True)
    if options.fake_stubborn:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fake_child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options.fake_child).write_text(str(child.pid))
    if options.fake_error:
        print(options.fake_error, flush=True)
        sys.exit(1)
    if options.fake_silence:
        time.sleep(600)
    while options.fake_load and not options.fake_load.exists():
        time.sleep(0.01)
    Handler.engine = Engine(options)
    Quiet((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
