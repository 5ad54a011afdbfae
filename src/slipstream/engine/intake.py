"""Requests that come in: checked before any work, tokenized, and made into sequences with all that their steps need."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace

from slipstream.core.request import DEFAULT_OPTIONS, EmittedTokens, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.engine.continuation import check_emitted, resume
from slipstream.engine.parts import EngineParts
from slipstream.engine.requests import (
    Answer,
    Request,
    make_sequences,
    reproduces,
    request_options,
    request_seeds,
)
from slipstream.engine.stopping import StopRules
from slipstream.errors import ReasoningError, RequestError
from slipstream.models.audio import AudioReader
from slipstream.reasoning.options import StepOptions
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.sampling.structured import StructuredOutput
from slipstream.text.encoder_prompts import EncoderDecoderPrompts, EncoderDecoderTexts
from slipstream.text.expected import ExpectedText, PredictionEncoder
from slipstream.text.prediction import Prediction
from slipstream.text.prompts import EncodedPrompt, Prompt, encode_request
from slipstream.text.stream import NoText, TextStream


def encoder_decoder_prompts(served: EngineParts) -> EncoderDecoderPrompts | None:
    """What encodes prompts for an encoder and a decoder; None for a model without an encoder."""
    model = served.model
    if not model.encoded_shapes:
        return None
    texts = EncoderDecoderTexts.of(model.model, model.encoder_length)
    hear = None if texts.speech is None else AudioReader(model.path, served.config.revision).features
    return EncoderDecoderPrompts(served.tokenizer, texts, model.vocab_size, served.max_model_len, hear)


class Intake:
    """Makes requests of what callers send, and gives each its seeds."""

    def __init__(self, served: EngineParts) -> None:
        seed, vocab_size = served.config.seed, served.model.vocab_size
        self._served = served
        self._grammars = GrammarCompiler(served.tokenizer, vocab_size, served.end_token_ids)
        self._predictions = PredictionEncoder(served.tokenizer, vocab_size, served.max_model_len)
        self._seeds = request_seeds(seed)
        self._nonces = request_seeds(None if seed is None else derive_seed(seed, 2**41))
        self._ids = itertools.count()
        self.encoder_prompts = encoder_decoder_prompts(served)
        """What encodes prompts for an encoder and a decoder; None for a model without an encoder."""

    def default_params(self) -> SamplingParams:
        """The sampling parameters of a request without any, as a copy."""
        return SamplingParams(**self._served.sampling_defaults)

    def reproduces(self, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> bool:
        """Whether the same seed gives the same answer to such a request again, whatever is drafted for it."""
        return reproduces(
            self._served.verifier.reproducible, self._served.drafter.traits.max_nodes > 0, params, options
        )

    def admit(
        self,
        request_id: str,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
        grammar: Grammar | None,
        emitted: Seq[EmittedTokens],
    ) -> tuple[Request, list[Answer]]:
        """A request, and those of its answers that have not ended; see `Engine.add_request`."""
        params = self.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}")
        params = params.clone()  # the caller may go on to change its own
        options = request_options(options)
        self._check(params, options, emitted)
        if not isinstance(prompt, EncodedPrompt):
            prompt = self.encode(prompt, params, options)
        if grammar is None and (compiling := self.compile_grammar(params, tenant=options.tenant)) is not None:
            grammar = compiling.result()
        if emitted:
            check_emitted(emitted, params, self._served.model.vocab_size)
        sequences = self._sequences(request_id, prompt, params, options, grammar)
        answers = [self._answer(sequence, prompt.bad_words) for sequence in sequences]
        if emitted:
            resume(answers, emitted)
        unfinished = [answer for answer in answers if not answer.sequence.finished]
        request = Request(request_id, prompt.text, sequences, time.perf_counter())
        request.unfinished = len(unfinished)
        return request, unfinished

    def _check(self, params: SamplingParams, options: RequestOptions, emitted: Seq[EmittedTokens]) -> None:
        """Raise `RequestError` for options that this engine does not have, or does not have together."""
        methods = self._served.drafting.methods
        if options.draft_method not in (None, *methods):
            choice = " or ".join(map(repr, methods))
            raise RequestError(f"draft_method must be {choice} on this engine, got {options.draft_method!r}")
        if options.reasoning is None:
            return
        self._check_reasoning(options.reasoning, params)
        if any(answer.token_ids for answer in emitted):
            raise ReasoningError(
                "an answer with drafted steps cannot be continued: whose its tokens are is not known; "
                "leave out emitted, or reasoning"
            )

    def _check_reasoning(self, requested: StepOptions, params: SamplingParams) -> None:
        """Raise `ReasoningError` where this engine drafts no steps for such a request."""
        if not self._served.config.allow_lossy:
            raise ReasoningError(
                "reasoning may change the text, which this engine does not allow; start it with allow_lossy "
                "(--allow-lossy), or leave reasoning out"
            )
        self._served.extension.check(requested, params)

    def _sequences(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        options: RequestOptions,
        grammar: Grammar | None,
    ) -> list[Sequence]:
        served = self._served
        seed = next(self._seeds) if params.seed is None else params.seed
        leads = served.config.enable_prefix_caching
        sequences = make_sequences(
            request_id, prompt.token_ids, params, seed, options, self._ids, leads, prompt.expected
        )
        for sequence in sequences:
            sequence.grammar = grammar and grammar.copy()
            sequence.encoder_input = prompt.encoder_input
            if prompt.encoder_input is not None:
                sequence.metrics.num_prompt_tokens += len(prompt.encoder_input.token_ids)
            sequence.num_fast_tokens = served.model.num_fast_tokens(sequence.num_prompt_tokens)
            sequence.metrics.reproducible = self.reproduces(params, options)
            if options.max_draft_tokens != 0 and (
                served.drafter.traits.remembers
                or served.drafting.policy is not None
                or sequence.expected is not None
            ):
                # Drafts may depend on an earlier answer, made with the same seed's random numbers.
                sequence.nonce = next(self._nonces)
        return sequences

    def _answer(self, sequence: Sequence, bad_words: list[list[int]]) -> Answer:
        served, params, prompt = self._served, sequence.params, sequence.token_ids
        text = (TextStream if params.detokenize else NoText)(
            served.tokenizer,
            prompt,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
        )
        stop_token_ids = self._stop_token_ids(params)
        if sequence.grammar is not None and not stop_token_ids:
            stop_token_ids = served.end_token_ids  # an answer under a grammar needs a token to end with
        width = served.model.vocab_size
        never_first = () if self.encoder_prompts is None else self.encoder_prompts.texts.never_first
        processor = LogitsProcessor(
            params, list(prompt), stop_token_ids, bad_words, width, sequence.grammar, never_first
        )
        stop = StopRules(sequence, text, processor, served.end_token_ids, served.max_model_len)
        return Answer(sequence, processor, text, stop)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """All tokens that end an answer."""
        eos = frozenset[int]() if params.ignore_eos else self._served.end_token_ids
        return eos | set(params.stop_token_ids)

    def encode(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EncodedPrompt:
        """What tokenizing there is to do for a request, which may take long; may be called from any thread.

        Raises `RequestError` where the prompt or the prediction cannot be served.
        """
        vocab_size = self._served.model.vocab_size
        params.check_vocabulary(vocab_size)
        if self.encoder_prompts is not None:
            encoded = self.encoder_prompts.encode(prompt, params.bad_words)
        else:
            encoded = encode_request(
                self._served.tokenizer, prompt, params.bad_words, vocab_size, self._served.max_model_len
            )
        if options.prediction is None:
            return encoded
        return replace(encoded, expected=self.expected(options.prediction))

    def expected(self, prediction: Prediction) -> ExpectedText:
        """What a caller expects, in the target's tokens; may be called from any thread. Raises `PredictionError`."""
        return self._predictions.encode(prediction)

    def compile_grammar(
        self, params: SamplingParams, tried_bytes: int | None = None, tenant: str = ""
    ) -> Future[Grammar] | None:
        """Begin to compile the grammar of `params.structured`, None where nothing is; may be called from any thread.

        `tried_bytes` is what `GrammarCompiler.try_` found, where another process has tried it. What was compiled
        before is reused by the same `tenant` alone. The future raises `RequestError` where it cannot be followed.
        """
        if not isinstance(params.structured, StructuredOutput):
            return None
        return self._grammars.submit(params.structured, self._stop_token_ids(params), tried_bytes, tenant)

    def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> Future[bool]:
        """Whether a part of a larger constraint can be followed; the future raises `RequestError` where it cannot.

        May be called from any thread.
        """
        return self._grammars.check(structured, tenant)
