"""`/v1/completions`: its responses and chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.request import FinishReason, TokenLogprob
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.api.answer import Choices, finite, first_top, prompt_logprobs
from slipstream.serve.api.sampling import echoed_logprobs, scores_only
from slipstream.serve.api.schema import CompletionBody
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.job import Echo, Job
from slipstream.serve.service import Service


class CompletionAnswer(Choices):
    """Choices have a `text`. The choices of several prompts are numbered through, prompt after prompt."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, service: Service) -> None:
        super().__init__(job, service)
        self._offsets: dict[int, int] = {}  # choice to the characters of its tokens so far

    def add(self, prompt: int, update: Update) -> None:
        super().add(prompt, update)
        if not self._shows_answers:
            self.num_output_tokens = 0

    def deltas(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        """An echoed prompt comes in a choice's first chunk."""
        number = self.number(prompt, update.index)
        text = self._echoed(number) if number not in self._offsets else ""
        if self._shows_answers:
            text += update.text
        if not self.says_something(update, text):
            return []
        offset = self._offsets.get(number, 0)
        entries = [(entry.token_id, entry) for entry in update.logprobs or ()]
        logprobs, self._offsets[number] = completion_logprobs(self.tokens, entries, offset)
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._reason(update.finish_reason),
        }
        if self.job.return_token_ids:
            choice["token_ids"] = update.token_ids if self._shows_answers else []
        return [choice]

    def choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        shows = self._shows_answers
        choice: dict[str, Any] = {
            "index": number,
            "text": self._echoed(number) + (answer.text if shows else ""),
            "logprobs": completion_logprobs(self.tokens, self._entries(output, answer), 0)[0],
            "finish_reason": self._reason(answer.finish_reason),
            "stop_reason": answer.stop_reason if shows else None,
        }
        shown = prompt_logprobs(self.tokens, output.prompt_token_logprobs, self.job.prompt_logprobs)
        if shown is not None:
            choice["prompt_logprobs"] = shown
        if self.job.return_token_ids:
            choice |= {
                "token_ids": answer.token_ids if shows else [],
                "prompt_token_ids": output.prompt_token_ids,
            }
        return choice

    def _entries(
        self, output: RequestOutput, answer: CompletionOutput
    ) -> list[tuple[int, TokenLogprob | None]]:
        """Token ids and log-probabilities: of the prompt, where it is echoed with them, and of the answer."""
        echo = self.job.echo
        entries: list[tuple[int, TokenLogprob | None]] = []
        if echo is not None and echo.logprobs is not None and output.prompt_token_logprobs is not None:
            entries += zip(
                output.prompt_token_ids, first_top(output.prompt_token_logprobs, echo.logprobs), strict=True
            )
        if self._shows_answers:
            entries += [(entry.token_id, entry) for entry in answer.token_logprobs or ()]
        return entries

    @property
    def _shows_answers(self) -> bool:
        return self.job.echo is None or self.job.echo.with_answers

    def _echoed(self, number: int) -> str:
        """The prompt's text before an answer."""
        echo = self.job.echo
        return "" if echo is None else echo.texts[number // self.job.params.n]

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        """An answer with `max_tokens` 0 ends with `length`; the token that the engine made is not shown."""
        return reason if reason is None or self._shows_answers else FinishReason.LENGTH


async def echo_of(body: CompletionBody, prompts: Seq[Seq[int]], tokens: Tokens) -> Echo:
    """The prompts of `body` as they were written; those that are token ids, decoded."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if all(isinstance(text, str) for text in given):
        texts = [str(text) for text in given]
    else:
        texts = [await tokens.decode(prompt) for prompt in prompts]
    return Echo(tuple(texts), echoed_logprobs(body), with_answers=not scores_only(body))


def completion_logprobs(
    tokens: Tokens, entries: Seq[tuple[int, TokenLogprob | None]], offset: int
) -> tuple[dict[str, Any] | None, int]:
    """Parallel lists with an entry a token, and the offset after them. A prompt's first token has no
    log-probability: null.

    `text_offset` counts the characters of the tokens' own texts from the beginning of the choice's text.
    """
    if not entries:
        return None, offset
    texts = [tokens.text_of(token_id) for token_id, _ in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    lists = {
        "tokens": texts,
        "token_logprobs": [entry and finite(entry.logprob) for _, entry in entries],
        "top_logprobs": [entry and _by_text(tokens, entry) for _, entry in entries],
        "text_offset": offsets,
    }
    return lists, offset


def _by_text(tokens: Tokens, entry: TokenLogprob) -> dict[str, float]:
    """Alternatives, most probable first. Of tokens with the same text, such as parts of characters, it shows the
    first."""
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:
        found.setdefault(tokens.text_of(token_id), finite(logprob))
    return found
