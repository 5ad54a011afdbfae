"""Requests that must be refused, and with which status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "chat/completions", "completions"
_MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A bad request."""

    name: str
    path: str
    content: bytes
    status: int = 400
    method: str = "POST"


def _chat(name: str, status: int = 400, **body: Any) -> Refusal:
    content = json.dumps({"messages": _MESSAGES, "max_tokens": 4} | body).encode()
    return Refusal(name, CHAT, content, status)


def _completion(name: str, status: int = 400, **body: Any) -> Refusal:
    content = json.dumps({"prompt": "hi", "max_tokens": 4} | body).encode()
    return Refusal(name, COMPLETIONS, content, status)


REFUSALS = (
    Refusal("nothing", CHAT, b""),
    Refusal("half of an object", CHAT, b'{"messages": ['),
    Refusal("a list", CHAT, b"[]"),
    Refusal("not UTF-8", CHAT, b'{"messages": "\xff\xfe"}'),
    Refusal("half a surrogate", COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 4}'),
    Refusal("nested too deep", COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    Refusal("no messages", CHAT, b'{"max_tokens": 4}'),
    Refusal("no prompt", COMPLETIONS, b'{"max_tokens": 4}'),
    Refusal("no such path", "no/such/path", b"{}", 404),
    Refusal("GET", CHAT, b"", 405, "GET"),
    _chat("another model", 404, model="another"),
    _chat("messages empty", messages=[]),
    _chat("messages a text", messages="hi"),
    _chat("message without a role", messages=[{"content": "hi"}]),
    _chat("unknown name", temprature=1.0),
    _chat("temperature a text", temperature="hot"),
    _chat("temperature below 0", temperature=-1.0),
    _chat("temperature too small", temperature=1e-9),
    _chat("top_p 0", top_p=0.0),
    _chat("top_p above 1", top_p=1.5),
    _chat("n 0", n=0),
    _chat("n far too large", n=100_000),
    _chat("max_tokens 0", max_tokens=0),
    _chat("max_tokens beyond the context", max_tokens=10**7),
    _chat("min_tokens above max_tokens", min_tokens=9),
    _chat("too many stops", stop=["x"] * 65),
    _chat("stop a number", stop=5),
    _chat("seed a text", seed="7"),
    _chat("token that is not there", logit_bias={"99999999": 1.0}),
    _chat("bias of a word", logit_bias={"word": 1.0}),
    _chat("top_logprobs too many", logprobs=True, top_logprobs=1000),
    _chat("stream options without a stream", stream_options={"include_usage": True}),
    _chat("another drafter", speculation={"method": "no-such"}),
    _chat("response format of no kind", response_format={"type": "no-such"}),
    _chat("a stream, refused", stream=True, temperature=-1.0),
    _completion("prompt empty", prompt=""),
    _completion("prompt of no tokens", prompt=[]),
    _completion("prompt of a token that is not there", prompt=[10**9]),
    _completion("prompt mixed", prompt=["hi", 5]),
    _completion("prompt beyond the context", prompt=[5] * 100_000),
    _completion("best_of", best_of=3),
    _completion("a body too large", 413, prompt="x" * (5 * 2**20)),
)
"""`prompt beyond the context` and `a body too large` are long on purpose."""
