"""SentencePiece vocabularies in GGUF files, read as llama.cpp reads them.

llama.cpp takes tokens that are never cut out of the text first, puts a space in front of the text and of what follows
each such token where the file wants one, also before text that begins with a space, and joins neighbours into the
token of the best score until none is left. Here the same is said to the `tokenizers` library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from slipstream.errors import ModelError

_SPACE = "▁"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEEP_SPACE_BEHIND = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi 3's tokens of their own kind that take no white space with them, as all its others do."""


def sentence_piece(fields: Mapping[str, Any], path: str, tokens: list[str]) -> Tokenizer:
    """The tokenizer of a file's keys; raises `ModelError` where they do not fit together."""
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(
            f"{path!r} holds a tokenizer of {len(tokens)} tokens with {types!r:.40} as their kinds"
        )
    vocabulary = {token: index for index, token in enumerate(tokens) if token}
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    try:
        model = models.BPE(
            vocabulary,
            _merges(fields, path, tokens, vocabulary),
            unk_token=tokens[unknown] or None
            if type(unknown) is int and 0 <= unknown < len(tokens)
            else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    except ModelError:
        raise
    except Exception as error:  # the library has one class for all: a merge of unknown tokens, say
        raise ModelError(f"{path!r} holds a damaged tokenizer: {str(error).splitlines()[0]}") from None
    backend = Tokenizer(model)
    begins_with_space = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    to_pieces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_pieces)
    backend.decoder = decoders.Sequence(to_text)
    backend.add_tokens(_whole(fields, tokens, types))
    return backend


def _whole(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[AddedToken]:
    """The tokens that are never cut; those that a user did not define are special."""
    name = str(fields.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name  # llama.cpp knows them by this too
    return [
        AddedToken(
            token,
            special=kind != _USER_DEFINED,
            normalized=False,
            rstrip=strips and token not in _KEEP_SPACE_BEHIND,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _merges(
    fields: Mapping[str, Any], path: str, tokens: list[str], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Pairs of tokens, best first: those that a token can be cut into, by its score.

    Files whose scores are all the same may hold merges, which say more.
    """
    scores = fields.get("tokenizer.ggml.scores")
    given = fields.get("tokenizer.ggml.merges")
    is_scored = isinstance(scores, list) and len(scores) == len(tokens)
    if isinstance(given, list) and (not is_scored or len(set(scores or ())) == 1):
        pairs = [str(merge).split(" ", 1) for merge in given]
        return [(pair[0], pair[-1]) for pair in pairs]
    if not is_scored or not all(map(_is_score, scores or ())):
        raise ModelError(f"{path!r} holds a tokenizer without a score for each of its tokens")
    assert isinstance(scores, list)
    return [
        (left, right)
        for token, _ in sorted(zip(tokens, scores, strict=True), key=lambda scored: -scored[1])
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    ]


def _is_score(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)
