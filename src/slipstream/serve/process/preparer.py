"""What the server does of a request before the engine's process has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.request import DEFAULT_OPTIONS, EmittedTokens, RequestOptions
from slipstream.engine.continuation import check_emitted
from slipstream.engine.mailbox import Put
from slipstream.engine.requests import request_seeds
from slipstream.errors import RequestError
from slipstream.models.audio import AudioReader
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.answers import AnswerRecord, makes_text, params_out
from slipstream.serve.process.calls import RemoteCall
from slipstream.serve.process.protocol import EncoderMessage, Submit
from slipstream.text.encoder_prompts import EncoderDecoderPrompts
from slipstream.text.expected import PredictionEncoder
from slipstream.text.prompts import EncodedPrompt, Prompt, encode_request
from slipstream.text.stream import TextStream

SHORT_CHARACTERS = 4096
"""Texts up to this length are tokenised in the event loop."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request in tokens, whose constraint can be followed."""

    prompt: EncodedPrompt
    params: SamplingParams
    options: RequestOptions
    tried_bytes: int | None
    """As in `Submit`."""
    emitted: Seq[EmittedTokens]


class RequestPreparer:
    """Checks, tokenises, tries constraints and draws seeds, all as the engine of these info would."""

    def __init__(self, tokenizer: Any, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._sizes = info.vocab_size, info.max_model_len
        self._defaults = info.sampling_defaults
        self._seeds = request_seeds(info.seed)
        self._encoder_prompts: EncoderDecoderPrompts | None = None
        if info.encoder_texts is not None:
            hear = (
                None if info.encoder_texts.speech is None else AudioReader(info.model, info.revision).features
            )
            self._encoder_prompts = EncoderDecoderPrompts(tokenizer, info.encoder_texts, *self._sizes, hear)
        self._predictions = PredictionEncoder(tokenizer, *self._sizes)
        self._ends = frozenset(info.end_token_ids)
        self.grammars = GrammarCompiler(tokenizer, info.vocab_size, self._ends)

    def default_params(self) -> SamplingParams:
        """The sampling parameters of a request without any, as a copy."""
        return SamplingParams(**self._defaults)

    def params_of(self, given: SamplingParams | None, emitted: Seq[EmittedTokens]) -> SamplingParams:
        """The parameters of a request as a copy, since the caller may go on to change its own; raises `RequestError`,
        also where what was `emitted` before does not fit them."""
        params = self.default_params() if given is None else given
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}")
        if emitted:
            check_emitted(emitted, params, self._sizes[0])
        return params.clone()

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions | None,
        emitted: Seq[EmittedTokens],
    ) -> PreparedRequest:
        """Try the constraint and tokenise all texts; raises `RequestError`."""
        options = DEFAULT_OPTIONS if options is None else options
        tried_bytes = None
        if isinstance(params.structured, StructuredOutput):
            tried_bytes = await asyncio.wrap_future(self.grammars.try_(params.structured, options.tenant))
        encoded = await self._encode(prompt, params)
        if options.prediction is not None:
            expected = await asyncio.to_thread(self._predictions.tokens, options.prediction)
            options = replace(options, prediction=expected)
        return PreparedRequest(encoded, params, options, tried_bytes, emitted)

    def call(self, number: int, name: str, request: PreparedRequest, put: Put, aborted: bool) -> RemoteCall:
        """The request as it is sent; draws its seed where it has none."""
        prompt, params = request.prompt, request.params
        if params.seed is None:
            params.seed = next(self._seeds)
        values = params_out(params)
        if makes_text(params):
            values["detokenize"] = False
        submit = Submit(
            id=number,
            request_id=name,
            token_ids=prompt.token_ids,
            bad_words=prompt.bad_words,
            encoder_input=EncoderMessage.of(prompt.encoder_input),
            params=values,
            options=request.options,
            tried_bytes=request.tried_bytes,
            emitted=list(request.emitted),
        )
        answers = [self._record(params, prompt.token_ids) for _ in range(params.n)]
        for answer, entry in zip(answers, request.emitted, strict=False):  # it is checked, or empty
            answer.resume(entry)
        return RemoteCall(submit, params, prompt.text, put, answers, aborted)

    async def _encode(self, prompt: Prompt, params: SamplingParams) -> EncodedPrompt:
        params.check_vocabulary(self._sizes[0])
        if self._encoder_prompts is not None:
            return await asyncio.to_thread(self._encoder_prompts.encode, prompt, params.bad_words)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        num_characters = len(text) if isinstance(text, str) else 0
        if num_characters + sum(map(len, params.bad_words)) > SHORT_CHARACTERS:
            return await asyncio.to_thread(
                encode_request, self._tokenizer, prompt, params.bad_words, *self._sizes
            )
        return encode_request(self._tokenizer, prompt, params.bad_words, *self._sizes)

    def _record(self, params: SamplingParams, prompt_token_ids: list[int]) -> AnswerRecord:
        text = None
        if makes_text(params):
            text = TextStream(
                self._tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        return AnswerRecord(params, text, ends)
