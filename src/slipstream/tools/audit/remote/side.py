"""A server as one side of an audit: how it is called, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from slipstream.rpc.client import ServerAddress, error_of
from slipstream.text.prompts import plain_text
from slipstream.tools.audit.mix import NEUTRAL, NEUTRAL_FILTERS
from slipstream.tools.audit.records import AuditReply, AuditRequest
from slipstream.tools.audit.remote.reading import ReplyReader

NUM_TOPS = 5
"""Alternatives requested at each token."""
WITHOUT_SPECULATION = {"speculation": {"enabled": False}}
"""What turns speculation off for a request, on Slipstream's own server."""


@dataclass
class ServerInfo:
    """What a server can do, as it was found by requests."""

    owner: str = ""
    """`owned_by` of its model: slipstream, vllm, llamacpp and so on."""
    version: str | None = None
    returns_token_ids: bool = False
    returns_logprobs: bool = False
    returns_usage: bool = False
    knows_filters: bool = True
    """Whether top_k, min_p and repetition_penalty are accepted."""
    asks_token_ids: bool = True
    """Whether `return_token_ids` may be sent."""
    asks_logprobs: bool = True
    streams: bool = True
    keeps_seed: bool | None = None
    """Whether a seed repeats a sampled answer; None before it was tried."""
    lossy: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of speculation, where the server tells them."""

    @property
    def is_ours(self) -> bool:
        return self.owner == "slipstream"


@dataclass
class ServerSide:
    """A server, and what is sent to it in addition to the requests."""

    name: str
    address: ServerAddress
    extra: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    info: ServerInfo = field(default_factory=ServerInfo)
    num_replies: int = 0
    num_answers: int = 0
    """Answers of all replies: a reply may hold several."""
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_undrafted(self) -> bool:
        """Whether every request turns speculation off."""
        return all(self.extra.get(name) == value for name, value in WITHOUT_SPECULATION.items())

    async def send(
        self, client: httpx2.AsyncClient, request: AuditRequest, stream: bool = False
    ) -> AuditReply:
        """Send a request; a failure is in `AuditReply.error`, not raised."""
        path, body = self.body(request, stream)
        reply = await self._post(client, path, body, request.number, stream)
        if reply.error is None and not reply.answers:
            reply.error = "the response has no choices"
        if reply.error is None:
            self.num_replies += 1
            self.num_answers += len(reply.answers)
            self.num_prompt_tokens += reply.num_prompt_tokens or 0
            self.num_output_tokens += reply.num_output_tokens or 0
        else:
            self.num_failed += 1
        return reply

    def body(self, request: AuditRequest, stream: bool) -> tuple[str, dict[str, Any]]:
        """(path below `/v1`, body)."""
        info = self.info
        body: dict[str, Any] = {
            "model": self.address.model,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
        }
        body |= NEUTRAL | (NEUTRAL_FILTERS if info.knows_filters else {})
        body |= {name: _sendable(value) for name, value in request.params.items()}
        if info.asks_token_ids:
            body["return_token_ids"] = True
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self.extra
        is_text = request.token_ids is not None or self.raw
        if info.asks_logprobs:
            body |= {"logprobs": NUM_TOPS} if is_text else {"logprobs": True, "top_logprobs": NUM_TOPS}
        if request.token_ids is not None:
            return "completions", {**body, "prompt": list(request.token_ids)}
        if is_text:
            return "completions", {**body, "prompt": plain_text(request.text, request.messages)}
        messages = list(request.messages) or [{"role": "user", "content": request.text}]
        return "chat/completions", {**body, "messages": messages}

    async def _post(
        self, client: httpx2.AsyncClient, path: str, body: dict[str, Any], number: int, stream: bool
    ) -> AuditReply:
        reader = ReplyReader(number)
        failed = AuditReply(number)
        try:
            async with client.stream("POST", f"{self.address.url}/{path}", json=body) as response:
                if response.status_code >= 400:
                    failed.error = error_of(response.status_code, await response.aread())
                    return failed
                if not stream:
                    reader.add(json.loads(await response.aread()))
                    return reader.reply()
                failed.error = await _read_stream(response, reader)
        except httpx2.TimeoutException:
            failed.error = f"no byte came for {self.address.timeout_s:g} s"
        except httpx2.HTTPError as error:
            failed.error = f"the connection failed: {error or type(error).__name__}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            failed.error = f"the response is no answer: {type(error).__name__}: {error}"
        return failed if failed.error is not None else reader.reply()


async def _read_stream(response: httpx2.Response, reader: ReplyReader) -> str | None:
    """Read all events; returns what was wrong."""
    if "event-stream" not in response.headers.get("content-type", ""):
        return "the server does not stream: its response is no stream of events"
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            return None
        payload = json.loads(event.data)
        if isinstance(payload, dict) and payload.get("error") is not None:
            return f"in the stream: {payload['error']}"
        reader.add(payload)
    return "the stream ended before the answer did"


def _sendable(value: Any) -> Any:
    """JSON's keys are texts."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value
