"""A request and its answers between two processes: what is sent of them, and how the receiver puts them together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.request import EmittedTokens, FinishReason, TokenLogprob
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.text.stream import Piece, TextStream

_LEFT_OUT = {"output_kind", "extra_args"}
"""Fields of `SamplingParams` that the engine does not read."""


class AnswerEnd(msgspec.Struct, frozen=True, array_like=True):
    """One answer of a request that has ended."""

    text: str
    """All of it, also where the sender has only gone on with it; empty where the receiver makes the text."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    seed: int
    metrics: RequestMetrics


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended."""

    answers: list[AnswerEnd]
    prompt_logprobs: list[TokenLogprob | None] | None


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What some steps added to one answer."""

    index: int
    token_ids: list[int]
    from_draft: list[bool]
    pieces: list[tuple[str, bool]] = []
    """Released text, and whether a draft token yielded it; none where the receiver makes the text."""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    end: RequestEnd | None = None
    """With the update that ends the request's last answer."""


def params_out(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults, in plain values."""
    return {name: _plain(value) for name, value in _set_fields(params).items() if name not in _LEFT_OUT}


def params_in(values: dict[str, Any]) -> SamplingParams:
    """What `params_out` has written; raises `RequestError`."""
    try:
        return SamplingParams(**values)
    except TypeError as error:
        raise RequestError(str(error)) from None


def _set_fields(value: Any) -> dict[str, Any]:
    return {
        field.name: given for field in fields(value) if (given := getattr(value, field.name)) != field.default
    }


def _plain(value: Any) -> Any:
    return _set_fields(value) if is_dataclass(value) else value


def update_out(update: Update) -> AnswerUpdate:
    """An update as it is sent."""
    output = update.output
    end = None
    if output is not None:
        ends = [
            AnswerEnd(answer.text, answer.finish_reason, answer.stop_reason, answer.seed, answer.metrics)
            for answer in output.outputs
        ]
        end = RequestEnd(ends, output.prompt_token_logprobs)
    return AnswerUpdate(
        update.index,
        update.token_ids,
        update.from_draft,
        [(piece.text, piece.from_draft) for piece in update.pieces],
        update.logprobs,
        update.finish_reason,
        end,
    )


def makes_text(params: SamplingParams) -> bool:
    """Whether the server makes the text of such a request. Where text decides when an answer ends, or the token that
    ends it is shown, the engine makes it."""
    return params.detokenize and not params.stop and not params.include_stop_str_in_output


class AnswerRecord:
    """One answer as its receiver has it: what came so far, and its text where that is made here."""

    def __init__(
        self, params: SamplingParams, stream: TextStream | None = None, ends: frozenset[int] = frozenset()
    ) -> None:
        """`stream` makes the text; None where it comes with the updates. `ends` are the tokens that end the answer."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._from_draft: list[bool] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._text = ""
        self._stream = stream
        self._ends = ends

    def add(self, update: AnswerUpdate) -> list[Piece]:
        """Take an update in; the text that it releases."""
        self.token_ids += update.token_ids
        self._from_draft += update.from_draft
        if self._logprobs is not None and update.logprobs is not None:
            self._logprobs += update.logprobs
        self.finish_reason = update.finish_reason
        if self._stream is None:
            self._text += "".join(text for text, _ in update.pieces)
            return [Piece(text, from_draft) for text, from_draft in update.pieces]
        self._push(self._stream, update.token_ids, update.from_draft)
        if update.finish_reason not in (None, FinishReason.ABORT):
            self._stream.flush()
        return self._stream.take(self.finish_reason is not None)

    @property
    def emitted(self) -> EmittedTokens:
        """All of it, for another engine to continue."""
        return EmittedTokens(list(self.token_ids), list(self._from_draft), list(self._logprobs or ()))

    def resume(self, emitted: EmittedTokens) -> None:
        """Begin behind tokens whose text the caller has already."""
        flags = list(emitted.from_draft) or [False] * len(emitted.token_ids)
        self.token_ids += emitted.token_ids
        self._from_draft += flags
        if self._logprobs is not None:
            self._logprobs += emitted.logprobs
        if self._stream is not None:
            self._push(self._stream, emitted.token_ids, flags)
            self._stream.take(False)

    def _push(self, stream: TextStream, token_ids: Seq[int], from_draft: Seq[bool]) -> None:
        for token_id, drafted in zip(token_ids, from_draft, strict=True):
            if token_id not in self._ends:
                stream.push(token_id, drafted, check_stop=False)

    def output(self, index: int, end: AnswerEnd, texts: TokenTexts) -> CompletionOutput:
        """The whole answer."""
        return CompletionOutput(
            index=index,
            text=end.text or (self._text if self._stream is None else self._stream.text),
            token_ids=self.token_ids,
            from_draft=self._from_draft,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            seed=end.seed,
            token_logprobs=self._logprobs,
            metrics=end.metrics,
            texts=texts,
        )


def all_emitted(answers: Seq[AnswerRecord]) -> list[EmittedTokens]:
    """What came of each answer, for another engine to go on with; nothing where nothing came."""
    return [answer.emitted for answer in answers] if any(answer.token_ids for answer in answers) else []


def output_of(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    answers: Seq[AnswerRecord],
    end: RequestEnd,
    texts: TokenTexts,
) -> RequestOutput:
    """The finished request, from what came of it."""
    ended = enumerate(zip(answers, end.answers, strict=True))
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[answer.output(index, last, texts) for index, (answer, last) in ended],
        prompt_token_logprobs=end.prompt_logprobs,
        texts=texts,
    )


def update_in(
    request_id: str, update: AnswerUpdate, pieces: list[Piece], output: RequestOutput | None
) -> Update:
    """The update for the caller: with the text that it released, and with the output where it ends the request."""
    return Update(
        request_id=request_id,
        index=update.index,
        token_ids=update.token_ids,
        pieces=pieces,
        logprobs=update.logprobs,
        finish_reason=update.finish_reason,
        output=output,
        from_draft=update.from_draft,
    )
