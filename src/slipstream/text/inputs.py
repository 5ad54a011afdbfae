"""What callers give as text or token ids: arrays as lists, and texts that are valid Unicode."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from slipstream.errors import RequestError


def as_list(values: Any) -> Any:
    """A NumPy or PyTorch array as nested lists; anything else unchanged."""
    return values.tolist() if callable(getattr(values, "tolist", None)) else values


def is_token_id(value: Any) -> bool:
    """True for an int or a NumPy integer, not for a bool."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def check_characters(what: str, value: Any) -> None:
    """Raise `RequestError` where a text in `value`, a string or decoded JSON, has a lone surrogate.

    Python's strings may hold one; UTF-8, and so tokenizers and grammars, cannot. `what` is its name in the message.
    """
    parts, seen = [value], set[int]()
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                found = f"U+{ord(part[error.start]):04X} at character {error.start}"
                message = f"{what} must hold whole characters, got half of a surrogate pair, {found}"
                raise RequestError(message) from None
        elif isinstance(part, (Mapping, list, tuple)) and id(part) not in seen:
            seen.add(id(part))  # it may contain itself
            parts += [*part, *part.values()] if isinstance(part, Mapping) else part
