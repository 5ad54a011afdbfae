"""A request's bytes as decoded JSON: checked once, here, for every string that a body may hold."""

from __future__ import annotations

import json
from typing import Any

from slipstream.serve.errors import ApiError

MAX_DEPTH = 100
"""How deeply a body may be nested."""


def decode(raw: bytes) -> dict[str, Any]:
    """The object of a body; raises `ApiError` 400 unless it is one object in UTF-8 whose strings are all text.

    `json.loads` alone reads UTF-16 and UTF-32 too, and lets halves of surrogate pairs pass, as bytes and as escapes;
    tokenizers, grammars and responses fail on these.
    """
    encoding = json.detect_encoding(raw)
    if not encoding.startswith("utf-8"):
        raise _refusal(f"the body is {encoding.upper()}; send it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows write a mark of three bytes before it
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        if raw[error.start] == 0xED:  # where surrogates would be
            message += ", perhaps half of a surrogate pair, which is no character"
        raise _refusal(message) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refusal("the body must be a JSON object")
    if is_too_deep(value):
        raise _refusal(f"the body is nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text.lower() and has_lone_surrogate(value):
        raise _refusal("the body has half of a surrogate pair, which is no character")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON is nested deeper than `MAX_DEPTH`; what recurses into it would fail."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def has_lone_surrogate(value: Any) -> bool:
    """Whether decoded JSON has half a character somewhere: an escape can spell one, and nothing can read it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
