"""A small OpenAI-compatible server that streams, counts and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kit.fake_http import QuietHandler, served

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


class _Handler(QuietHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/v1/models":
            self.send(200, {"data": [{"id": MODEL}]})
        elif self.path == "/metrics" and fake.metrics is not None:
            self.send(200, fake.exposition(), "text/plain")
        else:
            self.send(404, "no such page", "text/plain")

    def do_POST(self) -> None:
        fake = self.fake
        body = self.body()
        with fake.lock:
            fake.requests.append({"path": self.path, **body})
            fake.num_at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.num_at_once)
            self.is_under_way = True
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
                self.send(200, "<p>hello</p>", "text/html")
            elif not body.get("stream"):
                self._whole()
            else:
                self._stream(body)
        finally:
            self._leave()

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
        self.send(200, answer)

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
        self._leave()  # before the client knows of the end, and sends its next request
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _leave(self) -> None:
        with self.fake.lock:
            self.fake.num_at_once -= self.is_under_way
            self.is_under_way = False

    def _event(self, payload: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(payload)}\n\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _error(self, status: int, message: str) -> None:
        self.send(status, {"error": {"message": message, "code": status}})


@contextmanager
def serve(**behaviour: Any) -> Iterator[FakeServer]:
    """A server on a free port, until the block ends."""
    fake = FakeServer(**behaviour)
    with served(_Handler, fake=fake) as address:
        fake.url = f"{address}/v1"
        yield fake
