"""Sampling parameters of a request, with vLLM's names and meanings, validated on construction."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.request import RequestOptions
from slipstream.draft.methods import DRAFT_MODEL
from slipstream.errors import RequestError
from slipstream.sampling.keywords import check_names, strict_keywords
from slipstream.sampling.structured import StructuredOutput
from slipstream.sampling.structured_outputs import StructuredOutputsParams
from slipstream.text.inputs import check_characters
from slipstream.vllm_names import SAMPLING

MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-5
"""A lower temperature other than 0 would overflow float32 logits."""
MAX_TEMPERATURE = 1e6
"""All tokens are about equally probable there. Beyond it float32 loses the differences of logits."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 1e4
"""Within these bounds penalised logits stay finite in float32, also at the lowest temperature."""
MAX_N = 16384
"""As in vLLM: every answer takes memory before its first step."""
MAX_STOPS, MAX_STOP_CHARACTERS = 256, 16384
"""Stop strings, and their total characters: each step searches for all of them."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS_CHARACTERS = 4096, 256, 65536
"""Bad words, characters of one, and total characters: all are tokenised, and each step searches for their prefixes."""
MAX_SHOWN = 80
"""Characters of an invalid value that a message quotes."""


def _names(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


_SPECULATION = {*_names(SpeculativeConfig), "num_speculative_tokens", DRAFT_MODEL.name} - {"options"}


class RequestOutputKind(Enum):
    """vLLM's modes of partial output. Accepted without effect: `LLM` returns finished answers, `AsyncEngine` deltas."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _place_of(name: str) -> str | None:
    """Return where a name belongs that is not a sampling parameter: to the request, the engine or its speculation."""
    if name in _names(RequestOptions):
        return f"it is a keyword of generate and chat, and a field of RequestOptions and of request bodies ({name}=…)"
    if name in _names(EngineConfig):
        return f"it belongs to the engine, as in LLM({name}=…)"
    if name in _SPECULATION:
        return f'it belongs to the engine\'s speculation, as in LLM(speculative_config={{"{name}": …}})'
    return None


@strict_keywords("sampling parameter", SAMPLING, _place_of)
@dataclass(kw_only=True)
class SamplingParams:
    """How the answers to one prompt are sampled and when they end.

    Validated on construction and whenever an attribute is set: an invalid value raises a one-line `RequestError` that
    says what is valid, and changes nothing. Lists are stored as tuples. An engine works on a copy. `check_vocabulary`
    does the checks that need the model.
    """

    n: int = 1
    """Answers per prompt, at most 16,384."""
    temperature: float = 1.0
    """0 is greedy: always the most probable token, ties to the lowest id. Otherwise within [1e-5, 1e6]."""
    top_k: int = 0
    """Keep the k most probable tokens, and those tied with the last of them; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens until their mass reaches `top_p`, and those tied with the last."""
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most probable one."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or answer are divided by it, negative ones multiplied; 1 is off. Within
    [1e-4, 1e4]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the answer already contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each of its occurrences in the answer."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to a number added to its logit, each within [-100, 100]."""
    min_tokens: int = 0
    """Stop tokens are masked until the answer has this many tokens."""
    max_tokens: int | None = 16
    """The most tokens in an answer; None is limited by the context only."""
    bad_words: Seq[str] = ()
    """Texts that must not occur in the answer; at most 4,096, of 256 characters each and 65,536 in all."""
    allowed_token_ids: Seq[int] | None = None
    """Only these tokens may occur in the answer; None allows all."""
    seed: int | None = None
    """0 to 2**63 - 1. None, or -1 as in vLLM, draws a fresh seed, which the output reports."""
    stop: Seq[str] = ()
    """One or several strings that end the answer; at most 256, of 16,384 characters in all."""
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Alternatives reported for each token; 0 reports the token alone, -1 the whole vocabulary, None nothing."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: Mapping[str, Any] | StructuredOutput | None = None
    """Constraint on the answer: a `StructuredOutput`, or its fields as an object. None is unconstrained."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """The same in vLLM's form; it is converted to `structured` and set to None."""
    detokenize: bool = True
    """Decode the tokens to text. Without it answers have token ids only, and `stop` is not allowed."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """vLLM's; without effect."""
    extra_args: Mapping[str, Any] | None = None
    """Data of the caller's own; not read by Slipstream."""

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("n", 1, MAX_N), ("top_k", -1, None), ("min_tokens", 0, None)):
            self._set(name, _whole(name, getattr(self, name), minimum, maximum))
        for name, minimum in (("max_tokens", 1), ("logprobs", -1), ("prompt_logprobs", -1)):
            if getattr(self, name) is not None:
                self._set(name, _whole(name, getattr(self, name), minimum))
        if self.seed == -1 and isinstance(self.seed, numbers.Integral):
            self._set("seed", None)
        if self.seed is not None:
            self._set("seed", _whole("seed", self.seed, 0, MAX_SEED))
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            self._set(name, _number(name, getattr(self, name), low, high))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._set("stop", _strings("stop", self.stop, MAX_STOPS, MAX_STOP_CHARACTERS))
        self._set("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            self._set("structured", StructuredOutput.from_mapping(self.structured))
        self._check_vllm_names()
        self._check_together()
        self._set("_checked", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_checked" not in self.__dict__:  # during construction
            self._set(name, value)
            return
        check_names([name], self.__dataclass_fields__, "sampling parameter", _place_of)
        others: dict[str, Any] = {"structured": None} if name == "structured_outputs" else {}
        changed = replace(self, **others, **{name: value})
        self.__dict__.update(changed.__dict__)

    def clone(self) -> SamplingParams:
        """An independent copy; its mappings, the only mutable values, are copied too."""
        other = copy(self)
        for name in ("logit_bias", "extra_args"):
            if (held := getattr(self, name)) is not None:
                other._set(name, dict(held))
        return other

    def _check_vllm_names(self) -> None:
        if self.structured_outputs is not None:
            meant = StructuredOutputsParams.from_any(self.structured_outputs).as_structured()
            if self.structured not in (None, meant):
                raise RequestError("structured and structured_outputs differ; omit one of them")
            self._set("structured", meant)
            self._set("structured_outputs", None)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise RequestError(f"extra_args must be a mapping, got {self.extra_args!r}")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop needs detokenize: without text no stop string can be found; omit one of them"
            )

    def _check_together(self) -> None:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature!r}"
            )
        if self.top_p == 0:
            raise RequestError("top_p must be above 0, got 0; 1 turns it off")
        longest = max(map(len, self.bad_words), default=0)
        if longest > MAX_BAD_WORD_CHARACTERS:
            raise RequestError(
                f"each of bad_words must have at most {MAX_BAD_WORD_CHARACTERS} characters, got one of {longest:,}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, which allows no token; omit it to allow all")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            ids = _token_ids("logit_bias token ids", self.logit_bias)
            biases = [_number("a logit_bias", bias, -100.0, 100.0) for bias in self.logit_bias.values()]
            self._set("logit_bias", dict(zip(ids, biases, strict=True)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # without the validation of `__setattr__`

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Read decoded JSON; the token ids of `logit_bias` may be strings such as "50256". Raises `RequestError`."""
        if not isinstance(mapping, Mapping):
            raise RequestError(f"sampling parameters must be an object of names and values, got {mapping!r}")
        values = dict(mapping)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = {
                # Longer strings are no token ids, and Python refuses to parse very long numbers.
                int(token)
                if isinstance(token, str) and token.isdecimal() and len(token) < 20
                else token: bias
                for token, bias in values["logit_bias"].items()
            }
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether tokens are left out by their rank or probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids past `vocab_size`, the width of the model's logits."""
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            highest = max(getattr(self, name) or (), default=0)
            if highest >= vocab_size:
                raise RequestError(
                    f"{name} has token id {highest}; this model's ids are 0 to {vocab_size - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's {vocab_size}, got {getattr(self, name)}"
                )


def _whole(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < minimum or (maximum is not None and value > maximum):
        most = "" if maximum is None else f" and at most {maximum}"
        raise RequestError(f"{name} must be a whole number of at least {minimum}{most}, got {_shown(value)}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN fails the comparison too
        raise RequestError(f"{name} must be a finite number within [{low:g}, {high:g}], got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    """An invalid value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print very long numbers
        return f"a number of {value.bit_length():,} bits"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _strings(name: str, values: Any, most: int, most_characters: int) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else () if values is None else values
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise RequestError(f"{name} must be a string or a list of strings, got {_shown(values)}")
    strings = tuple(values)
    for value in strings:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} must hold strings that are not empty, got {_shown(value)}")
        check_characters(name, value)
    num_characters = sum(map(len, strings))
    if len(strings) > most:
        raise RequestError(f"{name} must hold at most {most:,} strings, got {len(strings):,}")
    if num_characters > most_characters:
        raise RequestError(
            f"{name} must have at most {most_characters:,} characters in all, got {num_characters:,}"
        )
    return strings


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids without duplicates, in their order; raises `RequestError`."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise RequestError(f"{name} must be a list of token ids, got {_shown(values)}")
    checked = (
        value if type(value) is int and value >= 0 else _whole(f"each of {name}", value, 0)
        for value in values
    )
    return tuple(dict.fromkeys(checked))
