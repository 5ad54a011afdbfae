"""Generate answers to conversations, with an engine in this process or an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx2

from slipstream.engine.engine import Engine
from slipstream.errors import RemoteError, RequestError
from slipstream.rpc.client import ServerAddress, error_of, trusted
from slipstream.sampling.params import SamplingParams
from slipstream.text.jsonl import Message
from slipstream.text.prompts import encode_conversation, encode_prompt


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The answer to one conversation."""

    text: str
    finish_reason: str
    num_tokens: int
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """Token ids of the answer, including an end token; None from a server, like the prompt's."""


class Answerer(Protocol):
    """Answers several conversations at once, in any order."""

    room: int
    """The most conversations at once."""

    def submit(self, key: str, messages: Seq[Message], params: SamplingParams) -> None:
        """Start an answer; raises `RequestError` for an invalid conversation."""

    def answers(self) -> list[tuple[str, TargetAnswer]]:
        """Continue generating; returns (key, answer) of the finished ones, perhaps none."""

    def close(self) -> None:
        """Abort the running conversations."""


class EngineAnswerer:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.room = engine.config.max_num_seqs
        self._running: set[str] = set()

    def submit(self, key: str, messages: Seq[Message], params: SamplingParams) -> None:
        engine = self.engine
        token_ids = encode_conversation(engine.tokenizer, messages)
        encode_prompt(engine.tokenizer, token_ids, engine.model.vocab_size, engine.max_model_len)
        room = engine.max_model_len - len(token_ids)
        engine.add_request(key, token_ids, replace(params, max_tokens=min(params.max_tokens or room, room)))
        self._running.add(key)

    def answers(self) -> list[tuple[str, TargetAnswer]]:
        done: list[tuple[str, TargetAnswer]] = []
        for update in self.engine.step():
            if update.output is None:
                continue
            self._running.remove(update.request_id)
            [only] = update.output.outputs
            reason, prompt = only.finish_reason.value, update.output.prompt_token_ids
            done.append(
                (
                    update.request_id,
                    TargetAnswer(only.text, reason, len(only.token_ids), prompt, only.token_ids),
                )
            )
        return done

    def close(self) -> None:
        for key in self._running:
            self.engine.abort(key)


class ServerAnswerer:
    """An OpenAI-compatible server, asked by `room` threads."""

    def __init__(self, server: ServerAddress, room: int) -> None:
        self.room = room
        self._server = server
        self._pool = ThreadPoolExecutor(room)
        self._running: dict[Future[TargetAnswer], str] = {}

    def submit(self, key: str, messages: Seq[Message], params: SamplingParams) -> None:
        body = {
            "model": self._server.model,
            "messages": list(messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
        }
        self._running[self._pool.submit(self._post, body)] = key

    def answers(self) -> list[tuple[str, TargetAnswer]]:
        done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, body: Mapping[str, Any]) -> TargetAnswer:
        """In a thread, over a connection of its own: one that is shared may be opened after it was closed."""
        server = self._server
        url = f"{server.url}/chat/completions"
        try:
            response = httpx2.post(
                url, json=body, headers=server.headers, timeout=server.timeout_s, verify=trusted()
            )
        except httpx2.TimeoutException:
            raise RemoteError(f"{url} sent no byte for {self._server.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RemoteError(f"cannot reach {url}: {error or type(error).__name__}") from None
        if response.status_code >= 400:
            text = f"{url} answers {error_of(response.status_code, response.content)}"
            raise RequestError(text) if response.status_code in (400, 413, 422) else RemoteError(text)
        try:
            payload = response.json()
            choice = payload["choices"][0]
            text, reason = choice["message"]["content"] or "", choice["finish_reason"]
            return TargetAnswer(
                text, str(reason), int((payload.get("usage") or {}).get("completion_tokens", 0))
            )
        except (ValueError, LookupError, TypeError):
            raise RemoteError(f"the response of {url} is not a chat completion") from None
