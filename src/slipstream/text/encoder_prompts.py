"""Encodes a request to an encoder-decoder: what its encoder reads, and how its answer begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError
from slipstream.text.encoder_input import EncoderInput
from slipstream.text.inputs import check_characters
from slipstream.text.prompts import AudioPrompt, EncodedPrompt, encode_bad_words, encode_prompt, parse_prompt
from slipstream.text.speech import SpeechTexts

_TEXT_KEYS = frozenset({"encoder_prompt", "decoder_prompt"})
_SPEECH_KEYS = frozenset({"audio", "language", "task", "decoder_prompt"})
_TEXT_FORMS = '{"encoder_prompt": ..., "decoder_prompt": ...}'
_SPEECH_FORMS = '{"audio": ..., "language": ..., "task": ...} or {"audio": ..., "decoder_prompt": ...}'


@dataclass(frozen=True)
class EncoderDecoderTexts:
    """What an encoder-decoder reads, how its answers begin, and what they never have."""

    encoder_length: int
    """The most positions of what the encoder reads."""
    start: int
    """The token before every answer."""
    forced: tuple[int, ...] = ()
    """What an answer begins with where the caller says nothing else."""
    never: tuple[tuple[int, ...], ...] = ()
    """Tokens, and sequences of them, that no answer has."""
    never_first: tuple[int, ...] = ()
    """Tokens that no answer begins with."""
    speech: SpeechTexts | None = None
    """How a speech model's answers begin; None for a model that reads text."""

    @classmethod
    def of(cls, model: Any, encoder_length: int) -> EncoderDecoderTexts:
        """What the configurations of a model of Transformers say, an `EncoderDecoder`."""
        settings, config = model.generation_config, model.config
        named = (getattr(each, "decoder_start_token_id", None) for each in (settings, config))
        start = next((token for token in named if token is not None), None)
        if start is None:  # as Transformers does
            start = getattr(settings, "bos_token_id", None) or 0
        forced = getattr(settings, "forced_bos_token_id", None)
        suppressed = getattr(settings, "suppress_tokens", None) or ()
        words = getattr(settings, "bad_words_ids", None) or ()
        return cls(
            encoder_length=encoder_length,
            start=int(start),
            forced=() if forced is None else (int(forced),),
            never=(*((int(token),) for token in suppressed), *(tuple(map(int, word)) for word in words)),
            never_first=tuple(map(int, getattr(settings, "begin_suppress_tokens", None) or ())),
            speech=SpeechTexts.of(settings) if model.is_audio else None,
        )

    def detecting(self, audio: Any) -> tuple[AudioPrompt, list[int]]:
        """The prompt of a speech model whose most probable answer is the language that is spoken, and the tokens of the
        languages."""
        tokens = [] if self.speech is None else sorted(self.speech.languages.values())
        return {"audio": audio, "decoder_prompt": [self.start]}, tokens


class EncoderDecoderPrompts:
    """Encodes what callers send to one model."""

    def __init__(
        self,
        tokenizer: Any,
        texts: EncoderDecoderTexts,
        vocab_size: int,
        max_model_len: int,
        hear: Callable[[Any], Any] | None = None,
    ) -> None:
        """`hear` makes features of a sound, for a speech model."""
        self.texts = texts
        self._tokenizer, self._hear = tokenizer, hear
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def encode(self, prompt: Any, bad_words: Seq[str]) -> EncodedPrompt:
        """A request in token ids and features; raises `RequestError` where a part is missing, empty or too long.

        A text, or token ids, without `encoder_prompt` are what the encoder reads.
        """
        words = [*encode_bad_words(self._tokenizer, bad_words), *map(list, self.texts.never)]
        if self.texts.speech is not None:
            given, begun = self._heard(prompt, self.texts.speech)
            return EncodedPrompt(None, begun, words, encoder_input=given)
        own: Any = None
        if isinstance(prompt, Mapping) and _TEXT_KEYS & prompt.keys():
            _check_keys(prompt, _TEXT_KEYS, "encoder_prompt", _TEXT_FORMS)
            prompt, own = prompt["encoder_prompt"], prompt.get("decoder_prompt")
        text, read = parse_prompt(prompt)
        token_ids = encode_prompt(self._tokenizer, read, self._vocab_size, sys.maxsize)
        if len(token_ids) > self.texts.encoder_length:
            raise RequestError(
                f"the encoder's prompt has {len(token_ids)} tokens, and the encoder reads {self.texts.encoder_length}; "
                "shorten it"
            )
        begun = self._begun([self.texts.start, *self.texts.forced] if own is None else own)
        return EncodedPrompt(text, begun, words, encoder_input=EncoderInput(tuple(token_ids)))

    def detects(self, prompt: Any) -> bool:
        """Whether a prompt leaves it to the model which language is spoken."""
        speech = self.texts.speech
        if speech is None or not isinstance(prompt, Mapping) or prompt.get("decoder_prompt") is not None:
            return False
        return "audio" in prompt and speech.detects(prompt.get("language"))

    def _heard(self, prompt: Any, speech: SpeechTexts) -> tuple[EncoderInput, list[int]]:
        assert self._hear is not None
        if not isinstance(prompt, Mapping):
            raise RequestError(f"a prompt of a speech model is {_SPEECH_FORMS}, got {type(prompt).__name__}")
        _check_keys(prompt, _SPEECH_KEYS, "audio", _SPEECH_FORMS)
        own = prompt.get("decoder_prompt")
        if own is None:
            if speech.detects(prompt.get("language")):
                raise RequestError('say which language is spoken, such as "language": "en"')
            own = speech.begin(prompt.get("language"), prompt.get("task"))
        return EncoderInput(features=self._hear(prompt["audio"])), self._begun(own)

    def _begun(self, own: Any) -> list[int]:
        """The decoder's prompt: the start, and what the caller gives or the model requires."""
        _, own = parse_prompt(own)
        if isinstance(own, str):
            check_characters("the decoder's prompt", own)
            own = self._tokenizer(own, add_special_tokens=False, verbose=False).input_ids
        given = list(own)
        token_ids = given if self.texts.start in given else [self.texts.start, *given]
        return encode_prompt(self._tokenizer, token_ids, self._vocab_size, self._max_model_len)


def _check_keys(prompt: Mapping[str, Any], known: frozenset[str], needed: str, forms: str) -> None:
    if prompt.keys() - known or needed not in prompt:
        raise RequestError(
            f"a prompt of this model is {forms}, got the keys {', '.join(map(repr, prompt)) or 'none'}"
        )
