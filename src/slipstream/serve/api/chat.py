"""`/v1/chat/completions`: its responses and chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.request import FinishReason, TokenLogprob
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.api.answer import Choices, finite, prompt_logprobs
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.job import Job
from slipstream.serve.service import Service
from slipstream.serve.tools.calls import CallReader


class ChatAnswer(Choices):
    """Choices have a `message`, or a `delta` when they are streamed."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, service: Service) -> None:
        super().__init__(job, service)
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}

    def deltas(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        """The role comes in a choice's first delta."""
        number = self.number(prompt, update.index)
        text, reader = update.text, self._reader(number)
        calls: list[dict[str, Any]] = []
        if reader is not None:
            text, calls = reader.feed(update.text, last=update.finish_reason is not None)
        if number in self._begun:
            delta: dict[str, Any] = {}
        else:
            self._begun.add(number)
            delta = {"role": "assistant", "content": "" if reader is None else None}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = calls
        if not delta and not self.says_something(update, ""):
            return []
        choice: dict[str, Any] = {
            "index": number,
            "delta": delta,
            "logprobs": chat_logprobs(self.tokens, update.logprobs),
            "finish_reason": _finish_reason(update.finish_reason, reader),
        }
        if self.job.return_token_ids:
            choice["token_ids"] = update.token_ids
        return [choice]

    def _reader(self, number: int) -> CallReader | None:
        """The reader of a choice's tool calls; None where the request has no tools."""
        constraint = self.job.constraint
        if constraint is None or constraint.tools is None:
            return None
        if number not in self._readers:
            self._readers[number] = CallReader(constraint.tools.format)
        return self._readers[number]

    def choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reader = self._reader(number)
        if reader is not None:
            text, _ = reader.feed(answer.text, last=True)
            message["content"] = text or None
            if reader.calls:
                message["tool_calls"] = [call.message() for call in reader.calls]
        choice: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": chat_logprobs(self.tokens, answer.token_logprobs),
            "finish_reason": _finish_reason(answer.finish_reason, reader),
            "stop_reason": answer.stop_reason,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def whole(self) -> dict[str, Any]:
        whole = super().whole()
        [output] = self.outputs
        shown = prompt_logprobs(self.tokens, output.prompt_token_logprobs, self.job.prompt_logprobs)
        if shown is not None:
            whole["prompt_logprobs"] = shown
        if self.job.return_token_ids:
            whole["prompt_token_ids"] = output.prompt_token_ids
        return whole


def _finish_reason(reason: FinishReason | None, reader: CallReader | None) -> str | None:
    """Why an answer has ended; `tool_calls` where it has calls."""
    has_called = reader is not None and bool(reader.calls)
    return "tool_calls" if has_called and reason == FinishReason.STOP else reason


def chat_logprobs(tokens: Tokens, entries: Seq[TokenLogprob] | None) -> dict[str, Any] | None:
    """One entry of `content` a token, however many a chunk holds."""
    if not entries:
        return None
    content = [
        _entry(tokens, entry.token_id, entry.logprob)
        | {"top_logprobs": [_entry(tokens, token_id, logprob) for token_id, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _entry(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.text_of(token_id), "logprob": finite(logprob), "bytes": tokens.bytes_of(token_id)}
