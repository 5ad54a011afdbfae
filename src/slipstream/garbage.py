"""Python's collector of cyclic garbage, kept from looking through what is made at a start and stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no cyclic garbage within the body.

    Imports and a model's load make a million objects that stay; looking through them again and again takes a fifth of
    a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
