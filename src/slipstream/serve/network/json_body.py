"""A request's bytes as decoded JSON; all strings in it are checked once, here."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from slipstream.serve.api.errors import ApiError, clipped

MAX_DEPTH = 100
"""The deepest nesting of a body."""
MAX_PARTS = 20_000
"""Most objects, lists and names in a body. Checking them blocks all other threads: a second for 100,000."""
MAX_DIGITS = 300
"""Most digits of a whole number: a float cannot hold more, and Python refuses to write more than 4,300."""
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def decode(raw: bytes) -> dict[str, Any]:
    """The object of a body; raises `ApiError` 400 unless it is one object in UTF-8 whose strings are all text.

    `json.loads` alone reads UTF-16 and UTF-32 too, and lets halves of surrogate pairs pass, as bytes and as escapes;
    tokenizers, grammars and responses fail on these.
    """
    encoding = json.detect_encoding(raw)
    if not encoding.startswith("utf-8"):
        raise _refusal(f"the body is {encoding.upper()}; send it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        if raw[error.start] == 0xED:  # an encoded surrogate
            message += ", perhaps half of a surrogate pair, which is no character"
        raise _refusal(message) from None
    if num_parts(raw) > MAX_PARTS:
        raise _refusal(f"the body has more than {MAX_PARTS:,} objects, lists and names")
    whole = (
        _whole if _LONG_NUMBER.search(raw) else None
    )  # a function of ours for every number would be slower
    try:
        value = json.loads(text, parse_int=whole, parse_float=_finite, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refusal("the body must be a JSON object")
    if is_too_deep(value):
        raise _refusal(f"the body is nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text.lower() and has_lone_surrogate(value):
        raise _refusal("the body has half of a surrogate pair, which is no character")
    return value


def num_parts(raw: bytes) -> int:
    """Objects, lists and names in JSON; exact where there are more than may be, else possibly more than there are."""
    num = _count(raw)
    if num <= MAX_PARTS:
        return num
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])  # of strings
    return _count(outside)


def _count(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[") + raw.count(b":")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _finite(number: str) -> float:
    """Refuse infinities and NaN: JSON has none, and a response could not repeat them."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{clipped(number, 20)} is not finite as a float")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no finite number")


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON is nested deeper than `MAX_DEPTH`, where recursive functions would fail."""
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
    """Whether decoded JSON has half of a surrogate pair, which an escape can spell and UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
