"""`/v1/completions`: its responses and chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core import TokenLogprob
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.answer import Choices, finite, prompt_logprobs
from slipstream.serve.job import Job
from slipstream.serve.service import Service
from slipstream.serve.tokens import Tokens


class CompletionAnswer(Choices):
    """Choices have a `text`. The choices of several prompts are numbered through, prompt after prompt."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, service: Service) -> None:
        super().__init__(job, service)
        self._offsets: dict[int, int] = {}  # choice to the characters of its tokens so far

    def deltas(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        if not self.says_something(update, update.text):
            return []
        number = self.number(prompt, update.index)
        offset = self._offsets.get(number, 0)
        logprobs, self._offsets[number] = completion_logprobs(self.tokens, update.logprobs, offset)
        choice: dict[str, Any] = {
            "index": number,
            "text": update.text,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = update.token_ids
        return [choice]

    def choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "text": answer.text,
            "logprobs": completion_logprobs(self.tokens, answer.logprobs, 0)[0],
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokens, output.prompt_logprobs)
        if self.job.return_token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice


def completion_logprobs(
    tokens: Tokens, entries: Seq[TokenLogprob] | None, offset: int
) -> tuple[dict[str, Any] | None, int]:
    """Parallel lists, an entry a token, and the offset behind them.

    `text_offset` counts the characters of the tokens' own texts from the beginning of the answer.
    """
    if not entries:
        return None, offset
    texts = [tokens.text_of(entry.token_id) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    lists = {
        "tokens": texts,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {tokens.text_of(token_id): finite(logprob) for token_id, logprob in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }
    return lists, offset
