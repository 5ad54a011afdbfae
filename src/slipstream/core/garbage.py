"""Python's collector of cyclic garbage, kept from looking through what is made at a start and stays."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no cyclic garbage within the body.

    Imports and a model's load make a million objects that stay; looking through them again and again takes about a
    tenth of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_garbage_at_exit() -> None:
    """Let this process end without looking for cyclic garbage, which takes over a second once models were loaded."""
    atexit.register(gc.freeze)
