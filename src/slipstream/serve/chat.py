"""`/v1/chat/completions`: its responses and chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core import TokenLogprob
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.answer import Answer, finite, prompt_logprobs
from slipstream.serve.job import Job
from slipstream.serve.service import Service
from slipstream.serve.tokens import Tokens


class ChatAnswer(Answer):
    """Choices have a `message`, or a `delta` when they are streamed."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, service: Service) -> None:
        super().__init__(job, service)
        self._begun: set[int] = set()

    def deltas(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        """The role comes in a choice's first delta."""
        number = self.number(prompt, update.index)
        if number in self._begun:
            delta: dict[str, Any] = {}
        else:
            self._begun.add(number)
            delta = {"role": "assistant", "content": ""}
        if update.text:
            delta["content"] = update.text
        if not delta and not self.says_something(update, ""):
            return []
        choice: dict[str, Any] = {
            "index": number,
            "delta": delta,
            "logprobs": chat_logprobs(self.tokens, update.logprobs),
            "finish_reason": update.finish_reason,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = update.token_ids
        return [choice]

    def choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(self.tokens, answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def whole(self) -> dict[str, Any]:
        whole = super().whole()
        [output] = self.outputs
        if output.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self.tokens, output.prompt_logprobs)
        if self.job.return_token_ids:
            whole["prompt_token_ids"] = output.prompt_token_ids
        return whole


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
