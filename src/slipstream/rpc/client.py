"""A client of an OpenAI-compatible server that times answers as they arrive."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx2

from slipstream.assets.workload.prompts import Prompt
from slipstream.errors import RemoteError
from slipstream.text.prompts import plain_text

_BODY_SHOWN = 200
"""Characters of an invalid response that an error message quotes."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's URLs, model and credentials."""

    url: str
    """With `/v1`, without a trailing slash."""
    model: str
    metrics_url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    """A request fails after this many seconds without a byte."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Exchange:
    """One request and its response. Seconds count from when it was sent, unless said otherwise."""

    prompt: int
    status: int | None = None
    """HTTP status; None without a response."""
    started_s: float = 0.0
    """When it was sent, on `time.perf_counter`'s clock."""
    text: str = ""
    num_chunks: int = 0
    time_to_first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Times between streamed pieces. A step with accepted draft tokens streams several tokens as one piece."""
    latency_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    """From `usage`; None where the server does not report it."""
    speculation: dict[str, Any] | None = None
    """`metrics.speculative_decoding` in vLLM's format, from servers that report it per request."""
    error: str | None = None


@cache
def trusted() -> ssl.SSLContext:
    """The certificates that are trusted. They are read once: that takes longer than many a request."""
    return httpx2.create_ssl_context()


def connect(server: ServerAddress) -> httpx2.AsyncClient:
    """A client without a limit on connections."""
    return httpx2.AsyncClient(
        verify=trusted(),
        headers=server.headers,
        timeout=server.timeout_s,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def send_request(
    client: httpx2.AsyncClient,
    server: ServerAddress,
    number: int,
    prompt: Prompt,
    raw: bool,
    extra: Mapping[str, Any],
    stream: bool = True,
) -> Exchange:
    """Send one prompt and read its answer; a failure is reported in `Exchange.error`, not raised."""
    path, body = request_body(server.model, prompt, raw, extra, stream)
    started_s = time.perf_counter()
    exchange = Exchange(number, started_s=started_s)
    try:
        async with client.stream("POST", f"{server.url}/{path}", json=body) as response:
            exchange.status = response.status_code
            if response.status_code >= 400:
                exchange.error = error_of(response.status_code, await response.aread())
            elif stream:
                await _read(response, exchange, started_s)
            else:
                _read_whole(await response.aread(), exchange)
    except httpx2.TimeoutException:
        exchange.error = f"no byte came for {server.timeout_s:g} s"
    except httpx2.HTTPError as error:
        exchange.error = f"the connection failed: {error or type(error).__name__}"
    exchange.latency_s = time.perf_counter() - started_s
    return exchange


def request_body(
    model: str, prompt: Prompt, raw: bool, extra: Mapping[str, Any], stream: bool = True
) -> tuple[str, dict[str, Any]]:
    """(path below `/v1`, body): a chat, or with `raw` a completion, of a conversation as plain text."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    common = {"model": model, "max_tokens": prompt.max_tokens, **streamed, **extra}
    if raw:
        return "completions", {**common, "prompt": plain_text(prompt.text, prompt.messages)}
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    return "chat/completions", {**common, "messages": messages}


def error_of(status: int, body: bytes) -> str:
    """'HTTP status: message', with the message of OpenAI's error format or else the body."""
    text = body.decode(errors="replace").strip()
    try:
        message = _message(json.loads(text)) or text
    except ValueError:
        message = text
    return f"HTTP {status}: {' '.join(message.split())[:_BODY_SHOWN]}"


async def _read(response: httpx2.Response, exchange: Exchange, started_s: float) -> None:
    """Fill the exchange from a stream of events."""
    last_s: float | None = None
    finished = False
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            finished = True
            break
        try:
            payload = json.loads(event.data)
        except ValueError:
            exchange.error = f"an event of the stream is not JSON: {event.data[:_BODY_SHOWN]}"
            return
        message = _message(payload)
        if message is not None:
            exchange.error = f"in the stream: {message}"
            return
        _take_figures(payload, exchange)
        for choice in payload.get("choices") or []:
            finished = finished or choice.get("finish_reason") is not None
            text = _text(choice)
            if not text:
                continue
            now_s = time.perf_counter()
            if last_s is None:
                exchange.time_to_first_token_s = now_s - started_s
            else:
                exchange.gaps_s.append(now_s - last_s)
            last_s = now_s
            exchange.num_chunks += 1
            exchange.text += text
    if not finished:
        exchange.error = "the stream ended before the answer did"


def _read_whole(body: bytes, exchange: Exchange) -> None:
    """Fill the exchange from a response in one piece."""
    try:
        payload = json.loads(body)
        exchange.text = "".join(_text(choice) for choice in payload["choices"])
    except (ValueError, LookupError, TypeError, AttributeError):
        exchange.error = f"the response is no answer: {body[:_BODY_SHOWN].decode(errors='replace')}"
        return
    exchange.num_chunks = 1
    _take_figures(payload, exchange)


def _take_figures(payload: Mapping[str, Any], exchange: Exchange) -> None:
    """Store the token counts and the request's speculation metrics, where the server sends them."""
    usage = payload.get("usage") or {}
    exchange.num_prompt_tokens = usage.get("prompt_tokens", exchange.num_prompt_tokens)
    exchange.num_output_tokens = usage.get("completion_tokens", exchange.num_output_tokens)
    metrics = payload.get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(found, dict):
        exchange.speculation = found


def _text(choice: Mapping[str, Any]) -> str:
    """A chunk's text, reasoning included."""
    delta = choice.get("delta") or choice.get("message") or {}
    parts = (
        delta.get("reasoning_content") or delta.get("reasoning"),
        delta.get("content"),
        choice.get("text"),
    )
    return "".join(part for part in parts if isinstance(part, str))


def _message(payload: Any) -> str | None:
    """The message of `{"error": {"message": …}}`; None where there is no error."""
    error = payload.get("error") if isinstance(payload, dict) else None
    if error is None:
        return None
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def find_url(url: str, api_key: str | None, timeout_s: float) -> str:
    """`url` with `/v1` appended if the server's API is there; queries the server only for a `url` without it.

    Raises `RemoteError` when the server cannot be reached.
    """
    url = url.rstrip("/")
    if url.endswith("/v1") or _models(url, api_key, timeout_s).status_code != 404:
        return url
    longer = f"{url}/v1"
    return url if _models(longer, api_key, timeout_s).status_code == 404 else longer


def find_model(url: str, api_key: str | None, timeout_s: float) -> str:
    """The first model that the server lists; raises `RemoteError` when there is none."""
    response = _models(url, api_key, timeout_s)
    if response.status_code >= 400:
        raise RemoteError(f"{url}/models answers {error_of(response.status_code, response.content)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RemoteError(f"{url}/models lists no model; name one with --served-model") from None


def _models(url: str, api_key: str | None, timeout_s: float) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return httpx2.get(f"{url}/models", headers=headers, timeout=timeout_s, verify=trusted())
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RemoteError(f"cannot reach {url}: {error or type(error).__name__}") from None


def scrape(server: ServerAddress) -> str | None:
    """The server's Prometheus metrics as text; None where it has none."""
    try:
        timeout_s = min(server.timeout_s, 30)
        response = httpx2.get(server.metrics_url, headers=server.headers, timeout=timeout_s, verify=trusted())
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return None
    return response.text if response.status_code == 200 else None
