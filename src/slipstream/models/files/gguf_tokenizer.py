"""Tokenizers in GGUF files.

A file holds the tokens, their kinds and merges, and of the way that text is cut into words only a name, which llama.cpp
knows the rule of. A rule that is not known here is refused: the prompt would be read as other tokens than the model was
trained with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from slipstream.errors import ModelError
from slipstream.models.files.gguf_sentencepiece import sentence_piece

_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_AND_MARKS = _LETTERS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}") % ""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**BYTE_LEVEL, "use_regex": False}]


WORDS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [{**BYTE_LEVEL, "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
    "llama-bpe": _split(_LETTERS % "{1,3}"),
    "qwen2": _split(_LETTERS % ""),
    "qwen35": _split(_LETTERS_AND_MARKS),
    "tekken": _split(_CASED % ("", "", "")),
    "gpt-4o": _split(_CASED % (_SHORT, _SHORT, "{1,3}")),
}
"""llama.cpp's name of a rule to the pre-tokenizers that follow it."""

_SAME = {
    **dict.fromkeys(("phi-2", "olmo"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "pixtral", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("chatglm-bpe", "glm4"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen",), "qwen2"),
}
"""Other names of the same rules."""
_TAKES_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"})
"""Rules under which a word that is a token is taken as it is, whatever the merges."""
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"})
"""Rules under which a prompt begins with the begin token where the file does not say."""
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def read_tokenizer(fields: Mapping[str, Any], path: str) -> Any:
    """The tokenizer of a GGUF file's keys, its chat template included.

    Raises `ModelError` where the file does not say how it cuts text, and names what to do.
    """
    kind, words = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre", "default"))
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{path!r} holds no tokenizer; pass --tokenizer with the model's folder or hub id")
    twice = [token for token, number in Counter(tokens).items() if number > 1 and token]
    if twice:
        raise ModelError(f"{path!r} holds a damaged tokenizer: the token {twice[0]!r:.40} more than once")
    if kind == "gpt2" and _SAME.get(words, words) in WORDS:
        backend = _byte_level(fields, path, tokens, words)
    elif kind in ("llama", "gemma4"):  # the latter has merges, and no scores that differ
        backend = sentence_piece({"tokenizer.ggml.add_space_prefix": kind == "llama", **fields}, path, tokens)
    else:
        raise ModelError(
            f"{path!r} has a tokenizer of kind {kind!r:.40}, {words!r:.40}, which cannot be restored here; known are "
            f"llama, gemma4, and gpt2 with {', '.join([*WORDS, *_SAME])}. Pass --tokenizer with the model's folder or "
            "hub id"
        )
    roles = _roles(fields, tokens)
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", kind != "gpt2" or words in _BEGINS))
    ends = bool(fields.get("tokenizer.ggml.add_eos_token", False))
    around = [roles.get("bos_token") if begins else None, "$A", roles.get("eos_token") if ends else None]
    if around != [None, "$A", None]:
        named = [name for name in around if name is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=named,
            pair=[*named, *(f"{name}:1" if name != "$A" else "$B:1" for name in named)],
            special_tokens=[(name, tokens.index(name)) for name in dict.fromkeys(named) if name != "$A"],
        )
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=_Uncopied(backend), **roles)
    if any(tokenizer.convert_tokens_to_ids(token) != tokens.index(token) for token in roles.values()):
        raise ModelError(f"{path!r} holds a damaged tokenizer: a token with a role is none of its vocabulary")
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ModelError(f"{path!r} has a chat template that is no text: {template!r:.40}")
    tokenizer.chat_template = template
    return tokenizer


class _Uncopied:
    """A backend whose deep copy is itself: Transformers would copy it by way of JSON, a second for 60,000 tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, _: dict[int, Any]) -> Tokenizer:
        return self._backend


def has_the_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is that of a GGUF file's model: nearly all tokens have the same numbers."""
    tokens, theirs = fields.get("tokenizer.ggml.tokens") or [], tokenizer.get_vocab()
    same = sum(1 for index, token in enumerate(tokens) if theirs.get(token) == index)
    return same > 0 and same >= 0.9 * min(len(tokens), len(theirs))


def _byte_level(fields: Mapping[str, Any], path: str, tokens: list[str], words: str) -> Tokenizer:
    """Byte-level BPE."""
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(
            f"{path!r} holds a tokenizer without its merges, or with {types!r:.40} as kinds of tokens"
        )
    named = _roles(fields, tokens).values()
    kept = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED or token in named}
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORDS[_SAME.get(words, words)]},
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": kept,
            "merges": [str(merge).split(" ", 1) for merge in merges],
            "ignore_merges": words in _TAKES_WHOLE_WORDS,
        },
    }
    try:
        backend = Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library has one class for all: a merge of unknown tokens, say
        raise ModelError(f"{path!r} holds a damaged tokenizer: {str(error).splitlines()[0]}") from None
    _add_whole(backend, kept, types)
    return backend


def _add_whole(backend: Tokenizer, kept: Mapping[str, int], types: list[int]) -> None:
    """Make the tokens whole that are never cut; those that control are special."""
    special = {_CONTROL: True, _USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=special[types[index]], normalized=False)
            for token, index in kept.items()
            if types[index] in special
        ]
    )


def _roles(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    roles = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        if type(index) is int and 0 <= index < len(tokens):
            roles[f"{name}_token"] = tokens[index]
    if roles.get("bos_token") == roles.get("eos_token") and not fields.get("tokenizer.ggml.add_bos_token"):
        roles.pop("bos_token", None)  # files must name one, also where there is none
    return roles
