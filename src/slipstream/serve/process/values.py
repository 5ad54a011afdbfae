"""Sampling parameters, updates and errors as the protocol writes them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import Any

import slipstream.errors
from slipstream.core.types import EmittedTokens, FinishReason, TokenLogprob
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.errors import RequestError, SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.serve.process.protocol import AnswerEnd, AnswerUpdate, RequestEnd
from slipstream.text.stream import Piece, TextStream

_LEFT_OUT = {"output_kind", "extra_args"}
"""Fields of `SamplingParams` that the engine does not read."""


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


def error_out(error: BaseException) -> tuple[str, str]:
    """The name of an error that was raised on purpose, empty for others, and its message."""
    if isinstance(error, SlipstreamError):
        return type(error).__name__, str(error)
    return "", f"{type(error).__name__}: {error}"


def error_in(name: str, message: str) -> Exception:
    """The error that the other process has raised."""
    kind = getattr(slipstream.errors, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, SlipstreamError):
        return kind(message)
    return RuntimeError(message)


def update_out(id_: int, update: Update, with_text: bool) -> AnswerUpdate:
    """An update for the server, with its text unless the server makes that itself."""
    output = update.output
    end = None
    if output is not None:
        end = RequestEnd(
            [
                AnswerEnd(
                    answer.text if with_text else None,
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.seed,
                    answer.metrics,
                )
                for answer in output.outputs
            ],
            output.prompt_token_logprobs,
        )
    pieces = [(piece.text, piece.from_draft) for piece in update.pieces] if with_text else None
    return AnswerUpdate(
        id_,
        update.index,
        update.token_ids,
        update.from_draft,
        pieces,
        update.logprobs,
        update.finish_reason,
        end,
    )


def makes_text(params: SamplingParams) -> bool:
    """Whether the server makes the text of such a request. Where text decides when an answer ends, or the token that
    ends it is shown, the engine makes it."""
    return params.detokenize and not params.stop and not params.include_stop_str_in_output


class AnswerRecord:
    """One answer as the server has it: what came so far, and its text where that is made here."""

    def __init__(self, params: SamplingParams, text: TextStream | None, ends: frozenset[int]) -> None:
        """`text` makes the text; None where it comes with the updates. `ends` are the tokens that end the answer."""
        self.token_ids: list[int] = []
        self.finished = False
        self._from_draft: list[bool] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._text = text
        self._ends = ends

    def add(self, update: AnswerUpdate) -> list[Piece]:
        """Take an update in; the text that it releases."""
        self.token_ids += update.token_ids
        self._from_draft += update.from_draft
        if self._logprobs is not None and update.logprobs is not None:
            self._logprobs += update.logprobs
        self.finished = update.finish_reason is not None
        if update.pieces is not None:
            return [Piece(text, from_draft) for text, from_draft in update.pieces]
        if self._text is None:
            return []
        self._push(update.token_ids, update.from_draft)
        if update.finish_reason not in (None, FinishReason.ABORT):
            self._text.flush()
        return self._text.take(self.finished)

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
        if self._text is not None:
            self._push(emitted.token_ids, flags)
            self._text.take(False)

    def _push(self, token_ids: Seq[int], from_draft: Seq[bool]) -> None:
        assert self._text is not None
        for token_id, drafted in zip(token_ids, from_draft, strict=True):
            if token_id not in self._ends:
                self._text.push(token_id, drafted, check_stop=False)

    def output(self, index: int, end: AnswerEnd, texts: TokenTexts) -> CompletionOutput:
        """The whole answer."""
        made = "" if self._text is None else self._text.text
        return CompletionOutput(
            index=index,
            text=made if end.text is None else end.text,
            token_ids=self.token_ids,
            from_draft=self._from_draft,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            seed=end.seed,
            token_logprobs=self._logprobs,
            metrics=end.metrics,
            texts=texts,
        )


def output_of(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    answers: list[AnswerRecord],
    end: RequestEnd,
    texts: TokenTexts,
) -> RequestOutput:
    """The finished request, from what came of it."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[
            answer.output(index, last, texts)
            for index, (answer, last) in enumerate(zip(answers, end.answers, strict=True))
        ],
        prompt_token_logprobs=end.prompt_logprobs,
        texts=texts,
    )
