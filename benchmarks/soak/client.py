"""One client's request and what came of it, read from the wire by code that the server does not share."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.soak.cases import Case
from benchmarks.soak.refusals import Refusal

ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(slots=True)
class Choice:
    """One answer as it was received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Received:
    """What came back. `problem` is None where the exchange was in order, whatever its texts are."""

    status: int | None = None
    """None where no response came at all."""
    choices: defaultdict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: dict[str, Any] | None = None
    complete: bool = False
    """The whole response, or a stream with `[DONE]`."""
    problem: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


async def ask_whole(client: httpx2.AsyncClient, case: Case, extra: dict[str, Any]) -> Received:
    """The answer in one piece."""
    received = Received()
    try:
        response = await client.post(f"/v1/{case.path}", json=case.body | extra)
        received.status = response.status_code
        if response.status_code == 200:
            _take(received, response.json())
            received.complete = True
        else:
            received.problem = f"refused with {response.status_code}: {response.text[:200]}"
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        received.problem = f"{type(error).__name__}: {error}"
    return received


async def ask_streamed(
    client: httpx2.AsyncClient, case: Case, extra: dict[str, Any], leave_after: int | None = None
) -> Received:
    """The answer as a stream; `leave_after` so many events the client goes."""
    received = Received()
    body = case.body | extra | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"/v1/{case.path}", json=body) as response:
            received.status = response.status_code
            if response.status_code != 200:
                text = (await response.aread())[:200].decode(errors="replace")
                received.problem = f"refused with {response.status_code}: {text}"
                return received
            num_events = 0
            async for payload in _events(response):
                if received.complete:
                    received.problem = "something came after [DONE]"
                elif payload is None:
                    received.complete = True
                else:
                    _take(received, payload)
                num_events += 1
                if leave_after is not None and num_events >= leave_after:
                    return received
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        received.problem = f"{type(error).__name__}: {error}"
    return received


async def leave_while_waiting(
    client: httpx2.AsyncClient, case: Case, extra: dict[str, Any], after_s: float
) -> Received:
    """Ask for an answer in one piece, and go when it has not come in time."""
    received = Received()
    with suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            received = await ask_whole(client, case, extra)
    return received


async def ask_refused(client: httpx2.AsyncClient, refusal: Refusal) -> Received:
    """A bad request; its `problem` is whatever is not as a refusal must be."""
    received = Received()
    try:
        response = await client.request(
            refusal.method,
            f"/v1/{refusal.path}",
            content=refusal.content,
            headers={"Content-Type": "application/json"},
        )
    except httpx2.HTTPError as error:
        received.problem = f"{type(error).__name__}: {error}"
        return received
    received.status = response.status_code
    received.complete = True
    if response.status_code != refusal.status:
        received.problem = f"answered {response.status_code} instead of {refusal.status}"
    else:
        received.problem = shape_fault(response.content)
    return received


def shape_fault(content: bytes) -> str | None:
    """What is not OpenAI's error shape in a body; None where all is."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, LookupError, TypeError):
        return "the body has no error object"
    if set(error) != ERROR_KEYS:
        return f"the error has the keys {sorted(error)}"
    if not isinstance(error["message"], str) or not error["message"]:
        return "the error has no message"
    if not isinstance(error["type"], str):
        return "the error's type is no text"
    if not all(isinstance(error[key], str | None) for key in ("param", "code")):
        return "the error's param or code is neither text nor null"
    return None


async def _events(response: httpx2.Response) -> AsyncIterator[Any]:
    """The payloads; None for `[DONE]`. Raises ValueError for what is no event."""
    async for line in response.aiter_lines():
        if not line:
            continue
        if not line.startswith("data: "):
            raise ValueError(f"a line of the stream is no event: {line[:100]!r}")
        data = line.removeprefix("data: ")
        yield None if data == "[DONE]" else json.loads(data)


def _take(received: Received, payload: dict[str, Any]) -> None:
    """Add a response, or a chunk of one."""
    if "error" in payload:
        raise ValueError(f"in the stream: {payload['error']}")
    received.usage = payload.get("usage") or received.usage
    for part in payload["choices"]:
        choice = received.choices[part["index"]]
        if choice.finish_reason is not None:
            raise ValueError(f"choice {part['index']} goes on after its end")
        said = part.get("delta") or part.get("message") or {}
        choice.text += part.get("text") or said.get("content") or ""
        choice.token_ids += part.get("token_ids") or []
        choice.logprobs += _logprobs(part.get("logprobs"))
        choice.finish_reason = part.get("finish_reason")


def _logprobs(found: dict[str, Any] | None) -> list[float]:
    """Return the log-probabilities of a chat, or of a completion."""
    if found is None:
        return []
    if "content" in found:
        return [entry["logprob"] for entry in found["content"]]
    return list(found["token_logprobs"])
