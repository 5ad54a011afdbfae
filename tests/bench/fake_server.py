"""A small OpenAI-compatible server that streams, counts and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"
PIECES = ["Hel", "lo", " wor", "ld"]
TOKENS_PER_PIECE = 2


@dataclass
class FakeServer:
    """What the server does, and what it has seen."""

    metrics: str | None = "vllm:"
    """Prefix of the counters; None answers 404."""
    usage: bool = True
    count_factor: float = 1.0
    """Counters grow by so many times the tokens that were sent."""
    overclaim: int = 0
    """Accepted tokens that an answer's counters claim beyond those it had."""
    status: int = 200
    refuse: int = 0
    """So many of the next requests are refused with status 429."""
    fail_in_stream: bool = False
    disconnect: bool = False
    html: bool = False
    """Answers with a page instead of a stream."""
    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_at_once: int = 0
    most_at_once: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    per_position: list[int] = field(default_factory=lambda: [0, 0, 0])
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    barrier: threading.Barrier | None = None
    """Answers wait here until so many are under way."""

    def count(self) -> None:
        """An answer of 8 tokens in 3 steps that drafted 3 each and accepted 3, 2 and 0 of them."""
        tokens = len(PIECES) * TOKENS_PER_PIECE
        accepted = 5 + self.overclaim
        grown = {
            "generation_tokens": tokens * self.count_factor,
            "prompt_tokens": 7,
            "request_success": 1,
            "spec_decode_num_drafts": 3,
            "spec_decode_num_draft_tokens": 9,
            "spec_decode_num_accepted_tokens": accepted,
        }
        with self.lock:
            for name, value in grown.items():
                self.counters[name] = self.counters.get(name, 0) + value
            self.per_position = [a + b for a, b in zip(self.per_position, [2, 2, 1], strict=True)]

    def exposition(self) -> str:
        """Prometheus text, with another model's counters beside this one's."""
        lines: list[str] = []
        for name, value in self.counters.items():
            full = f"{self.metrics}{name}_total"
            lines += [f"# TYPE {full} counter"]
            lines += [f'{full}{{engine="0",model_name="{MODEL}"}} {value}']
            lines += [f'{full}{{engine="0",model_name="another"}} {1000 * value}']
        full = f"{self.metrics}spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"# TYPE {full} counter")
        for position, value in enumerate(self.per_position):
            lines.append(f'{full}{{model_name="{MODEL}",position="{position}"}} {value}')
        return "\n".join(lines) + "\n"


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # else each answer waits 40 ms for the client's acknowledgement of its header
    )
    fake: FakeServer

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/v1/models":
            self._send(200, "application/json", json.dumps({"data": [{"id": MODEL}]}))
        elif self.path == "/metrics" and fake.metrics is not None:
            self._send(200, "text/plain", fake.exposition())
        else:
            self._send(404, "text/plain", "no such page")

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.requests.append({"path": self.path, **body})
            fake.num_at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.num_at_once)
            refused = fake.refuse > 0
            fake.refuse -= refused
        try:
            if fake.barrier is not None:
                fake.barrier.wait(timeout=120)
            if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self._error(401, "no such key")
            elif refused:
                self._error(429, "too many requests")
            elif fake.status != 200:
                self._error(fake.status, "the model is not loaded")
            elif fake.html:
                self._send(200, "text/html", "<p>hello</p>")
            elif not body.get("stream"):
                self._whole()
            else:
                self._stream(body)
        finally:
            with fake.lock:
                fake.num_at_once -= 1

    def _whole(self) -> None:
        """The answer of a chat in one piece, with the request's own figures in vLLM's shape."""
        self.fake.count()
        usage = {"prompt_tokens": 7, "completion_tokens": len(PIECES) * TOKENS_PER_PIECE}
        own = {"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 5}
        answer = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(PIECES)}}],
            "usage": usage,
            "metrics": {"speculative_decoding": own},
        }
        self._send(200, "application/json", json.dumps(answer))

    def _stream(self, body: dict[str, Any]) -> None:
        fake, chat = self.fake, self.path.endswith("/chat/completions")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number, piece in enumerate(PIECES):
            if number == 2 and fake.fail_in_stream:
                self._event({"error": {"message": "the engine stopped", "type": "server_error"}})
                self._chunk("")
                return
            if number == 2 and fake.disconnect:
                self.close_connection = True
                self.connection.close()
                return
            last = number == len(PIECES) - 1
            delta = {"delta": {"content": piece}} if chat else {"text": piece}
            self._event({"choices": [{"index": 0, **delta, "finish_reason": "length" if last else None}]})
        fake.count()
        if fake.usage and body["stream_options"]["include_usage"]:
            tokens = len(PIECES) * TOKENS_PER_PIECE
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, payload: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(payload)}\n\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _error(self, status: int, message: str) -> None:
        self._send(status, "application/json", json.dumps({"error": {"message": message, "code": status}}))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve(**behaviour: Any) -> Iterator[FakeServer]:
    """A server on a free port, until the block ends."""
    fake = FakeServer(**behaviour)
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Quiet(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
