"""What chats and completions have in common: one response while the engine works on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, ClassVar

from slipstream.core.request import TokenLogprob
from slipstream.core.version import __version__
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.job import Job
from slipstream.serve.metrics.figures import lossy_usage, prediction_usage, request_metrics, usage
from slipstream.serve.service import Service


class ApiAnswer(ABC):
    """A response in progress. `add` takes every update; then `chunks` are sent as they come, or `whole` at the end."""

    names_events: ClassVar[bool] = False
    """True where the events of a stream are named by their type. Otherwise the stream ends with `[DONE]`."""

    def __init__(self, job: Job, service: Service) -> None:
        self.job = job
        self.tokens = service.tokens
        self.num_output_tokens = 0
        self._model = service.model_name
        self._shows_metrics = service.config.per_request_metrics
        self._num_speculative_tokens = service.num_speculative_tokens
        self._outputs: dict[int, RequestOutput] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The finished prompts, in their order."""
        return [self._outputs[number] for number in sorted(self._outputs)]

    @property
    def is_complete(self) -> bool:
        return len(self._outputs) == len(self.job.prompts)

    def add(self, prompt: int, update: Update) -> None:
        """Count an update of the `prompt`-th prompt."""
        self.num_output_tokens += len(update.token_ids)
        if update.output is not None:
            self._outputs[prompt] = update.output

    @abstractmethod
    def chunks(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        """The chunks that a stream sends for an update; none while its text is held back."""

    def closing_chunk(self) -> dict[str, Any] | None:
        """The chunks that a stream sends after all updates."""
        return None

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed after it had begun."""
        return error.body()

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole response, where it is not streamed."""

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, of the prompts and the tokens of all updates so far."""
        cached = sum(output.outputs[0].metrics.num_cached_tokens for output in self.outputs)
        counted = usage(sum(map(len, self.job.prompts)), cached, self.num_output_tokens)
        if self.job.options.prediction is not None:
            counted["completion_tokens_details"] = prediction_usage(self.outputs)
        if self.is_lossy:
            details = counted.setdefault("completion_tokens_details", {})
            details |= lossy_usage(self.outputs)
            counted["lossy"] = True
        return counted

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's name for what served a request: another one where the text may not be the target's own."""
        return f"slipstream-{__version__}" + ("-lossy-step-reasoning" if self.is_lossy else "")

    @property
    def is_lossy(self) -> bool:
        """Whether the request chose step-level speculation: its text may not be the target's own."""
        return self.job.options.reasoning is not None

    def _lossy(self) -> dict[str, Any]:
        """What a response says at its end of a request that may be lossy: the steps of each choice, in their order."""
        if not self.is_lossy:
            return {}
        answers = [answer for output in self.outputs for answer in output.outputs]
        return {"lossy": True, "reasoning_steps": [answer.metrics.reasoning_log for answer in answers]}

    def _metrics(self) -> dict[str, Any]:
        if not self._shows_metrics:
            return {}
        return {"metrics": request_metrics(self.outputs, self._num_speculative_tokens)}


class Choices(ApiAnswer):
    """Answers as `choices`, in the shape of chats and completions."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def chunks(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        chunks = [self._chunk([choice]) for choice in self.deltas(prompt, update)]
        if chunks and self.is_complete and not self.job.include_usage:
            chunks[-1] |= self._metrics() | self._lossy()
        return chunks

    def closing_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream that was to have its usage."""
        return self._chunk([]) | self._end() if self.job.include_usage else None

    def whole(self) -> dict[str, Any]:
        choices = [
            self.choice(self.number(prompt, answer.index), output, answer)
            for prompt, output in enumerate(self.outputs)
            for answer in output.outputs
        ]
        return self._header(self.whole_object) | {"choices": choices} | self._end()

    def _end(self) -> dict[str, Any]:
        """What a response has at its end in addition to the choices."""
        return {"usage": self.usage()} | self._metrics() | self._lossy()

    def number(self, prompt: int, index: int) -> int:
        """The index of a choice among those of all prompts."""
        return prompt * self.job.params.n + index

    @abstractmethod
    def deltas(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        """The choices, one a chunk, that a stream sends for an update."""

    @abstractmethod
    def choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """A finished choice."""

    def says_something(self, update: Update, text: str) -> bool:
        """Whether an update needs a chunk: not while its text is held back and it carries nothing else."""
        return bool(text or update.finish_reason or update.logprobs) or (
            self.job.return_token_ids and bool(update.token_ids)
        )

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._header(self.chunk_object) | {"choices": choices}
        if self.job.include_usage:
            chunk["usage"] = self.usage() if self.job.continuous_usage else None
        return chunk

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.job.created,
            "model": self._model,
            "system_fingerprint": self.system_fingerprint,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a log-probability of minus infinity."""
    return max(logprob, -9999.0)


def prompt_logprobs(
    tokens: Tokens, entries: Seq[TokenLogprob | None] | None, num_top: int | None
) -> list[dict[str, Any] | None] | None:
    """A prompt's log-probabilities in vLLM's shape: token id to log-probability, rank and text.

    At most `num_top` of the alternatives in `entries` are shown; None where no log-probabilities were requested.
    """
    if entries is None or num_top is None:
        return None
    return [None if entry is None else _by_token(tokens, entry) for entry in first_top(entries, num_top)]


def first_top(entries: Seq[TokenLogprob | None], num_top: int) -> list[TokenLogprob | None]:
    """The entries with at most `num_top` alternatives each."""
    return [None if entry is None else replace(entry, top=entry.top[:num_top]) for entry in entries]


def _by_token(tokens: Tokens, entry: TokenLogprob) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        if token_id != entry.token_id
    ]
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.text_of(token_id)}
        for token_id, logprob, rank in ranked
    }
