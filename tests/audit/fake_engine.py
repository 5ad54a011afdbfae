"""A quick OpenAI-compatible server whose answers are a function of prompt, parameters and seed, with named faults."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kit.fake_http import QuietHandler, served

MODEL = "fake"
END = 0
NUM_TOKENS = 40


@dataclass
class FakeEngine:
    """How the server behaves. The defaults are honest."""

    owner: str = "vllm"
    keeps_seed: bool = True
    noise: int = 0
    """Servers with another number draw other tokens under the same seed."""
    gives_ids: bool = True
    gives_logprobs: bool = True
    streams: bool = True
    usage_factor: int = 1
    counter_factor: int = 1
    cut_every: int = 0
    """Every so many answers lose their second half."""
    flip_every: int = 0
    """Every so many answers have another token."""
    flipped: Container[int] = range(2**31)
    """The requests of which some may be flipped."""
    flip_margin: float = 0.5
    """What separates the two tokens there, in nats."""
    spread: float = 1.0
    """Exponent of the tokens' probabilities; another one is another temperature."""
    logprob_shift: float = 0.0
    logprob_jitter: float = 0.0
    """Added to the log-probabilities of every third answer."""
    fills_in: bool = False
    """Whether every third token's log-probability is 0 and without alternatives."""
    ignores_stop: bool = False
    empty: bool = False
    """All answers are."""
    fail_every: int = 0
    """Every so many requests are answered 500."""
    requests_counted: int = 1
    """In the counters, for each request."""
    drafted: int | None = None
    """Draft tokens that the counters grow by with each request; None has no such counter."""
    stream_drops: bool = False
    """Streams lack their last token."""
    fails_after: int | None = None
    """Requests after which the server answers 500."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that /server_info tells as one text unless JSON is asked for, as vLLM does."""
    card: dict[str, Any] = field(default_factory=dict)
    """Added to what /v1/models says."""
    refuses: tuple[str, ...] = ()
    """Parameters at which the server answers 400."""
    num_requests: int = 0
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each prompt was asked under each seed: where none is kept, each time has other noise."""
    counters: Counter[str] = field(default_factory=Counter)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """The answer's tokens, with the end token where it ends by itself."""
        prompt = json.dumps(body.get("prompt") or body.get("messages"))
        key: list[Any] = [prompt]
        if body.get("temperature", 1) != 0:
            key += [self.noise, body["seed"]]
            if not self.keeps_seed:
                with self.lock:
                    self.asked[prompt, body["seed"]] += 1
                    key.append(self.asked[prompt, body["seed"]])
        chance = random.Random(json.dumps([*key, body.get("temperature"), body.get("top_p")]))
        weights = [1 / (1 + token) ** self.spread for token in range(1, NUM_TOKENS)]
        length = body["max_tokens"]
        found = chance.choices(range(1, NUM_TOKENS), weights, k=length)
        if not body.get("ignore_eos") and chance.random() < 0.3 and length > 2:
            found = [*found[: chance.randrange(1, length)], END]
        return found

    def faulty(self, tokens: list[int], number: int, max_tokens: int) -> list[int]:
        """The same with this server's faults."""
        if self.empty:
            return []
        flips = self.flip_every and number % self.flip_every == 0 and number in self.flipped
        if flips and len(tokens) > 2 and tokens[1] != END:
            tokens = [tokens[0], tokens[1] % (NUM_TOKENS - 1) + 1, *tokens[2:]]
        if self.cut_every and number % self.cut_every == 0:
            tokens = tokens[: len(tokens) // 2]
        return tokens


def text_of(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens if token != END)


class _Handler(QuietHandler):
    fake: FakeEngine

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/v1/models":
            self.send(200, {"data": [{"id": MODEL, "owned_by": fake.owner, **fake.card}]})
        elif self.path == "/version":
            self.send(200, {"version": "1.2"})
        elif self.path == "/server_info?config_format=json":
            self.send(200, fake.settings)
        elif self.path == "/server_info":
            self.send(200, {name: str(value) for name, value in fake.settings.items()})
        elif self.path == "/metrics":
            lines = [
                f'vllm:{name}_total{{model_name="{MODEL}"}} {value}' for name, value in fake.counters.items()
            ]
            kinds = [f"# TYPE vllm:{name}_total counter" for name in fake.counters]
            text = "\n".join(line for pair in zip(kinds, lines, strict=True) for line in pair) + "\n"
            self.send(200, text, "text/plain")
        else:
            self.send(404, {})

    def do_POST(self) -> None:
        fake = self.fake
        body = self.body()
        with fake.lock:
            fake.num_requests += 1
            number = fake.num_requests
        dead = fake.fails_after is not None and number > fake.fails_after
        if dead or (fake.fail_every and number % fake.fail_every == 0):
            self.send(500, {"error": {"message": "the engine died"}})
            return
        if refused := [name for name in fake.refuses if name in body]:
            self.send(400, {"error": {"message": f"{refused[0]} is not known"}})
            return
        tokens = fake.faulty(fake.tokens(body), number, body["max_tokens"])
        text, reason = text_of(tokens), "stop" if tokens and tokens[-1] == END else "length"
        for stop in [] if fake.ignores_stop or body.get("min_tokens") else body.get("stop") or []:
            if stop in text:
                text, reason = text[: text.index(stop)], "stop"
        usage = {"prompt_tokens": 7, "completion_tokens": len(tokens) * fake.usage_factor}
        usage["total_tokens"] = sum(usage.values())
        with fake.lock:
            fake.counters["generation_tokens"] += len(tokens) * fake.counter_factor
            fake.counters["prompt_tokens"] += 7
            fake.counters["request_success"] += fake.requests_counted
            if fake.drafted is not None:
                fake.counters["spec_decode_num_draft_tokens"] += fake.drafted
        if body.get("stream") and fake.streams:
            self._stream(tokens, text, reason, usage)
        else:
            self.send(200, {"choices": [self._choice(tokens, text, reason, body, number)], "usage": usage})

    def _choice(
        self, tokens: list[int], text: str, reason: str, body: dict[str, Any], number: int
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
        }
        if self.fake.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if self.fake.gives_logprobs and body.get("logprobs"):
            entries = [self._entry(token, number) for token in tokens]
            if self.fake.fills_in:
                filled = {"logprob": 0, "top_logprobs": []}
                entries = [{**one, **(filled if place % 3 == 2 else {})} for place, one in enumerate(entries)]
            choice["logprobs"] = {"content": entries}
        return choice

    def _entry(self, token: int, number: int) -> dict[str, Any]:
        near = token % (NUM_TOKENS - 1) + 1
        value = -1.0 + self.fake.logprob_shift + self.fake.logprob_jitter * (number % 3 == 0)
        tops = [{"token": f"w{token}", "logprob": value}]
        tops += [{"token": f"w{near}", "logprob": value - self.fake.flip_margin}]
        return {"token": f"w{token}", "logprob": value, "top_logprobs": tops}

    def _stream(self, tokens: list[int], text: str, reason: str, usage: dict[str, int]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        ids = tokens[:-1] if self.fake.stream_drops else tokens
        delta = {"content": text_of(ids) if self.fake.stream_drops else text}
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "token_ids": ids}
        for payload in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            self.wfile.write(f"data: {json.dumps(payload)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


@contextmanager
def serve(**behaviour: Any) -> Iterator[FakeEngine]:
    """A server on a free port, until the block ends."""
    fake = FakeEngine(**behaviour)
    with served(_Handler, fake=fake) as address:
        fake.url = f"{address}/v1"
        yield fake
