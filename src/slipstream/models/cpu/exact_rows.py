"""Whether weights of 4 or 8 bits multiply rows as they are (`exact_rows`), or rows that are rounded to 8 bits.

Weights that are packed in the body of `multiplying_exactly` keep to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_exact: ContextVar[bool] = ContextVar("exact_rows", default=False)


def are_exact() -> bool:
    """Whether weights that are packed here multiply rows as they are."""
    return _exact.get()


@contextmanager
def multiplying_exactly(exact: bool) -> Iterator[None]:
    """Have weights that are packed in the body do so."""
    token = _exact.set(exact)
    try:
        yield
    finally:
        _exact.reset(token)
