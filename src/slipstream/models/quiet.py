"""Transformers without its own messages: its exceptions in one line, its bars and warnings silenced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from slipstream.errors import ModelError, SlipstreamError


@contextlib.contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn any exception of Transformers into a `ModelError` of one line."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise ModelError(f"{what}: {said}") from None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings within the body."""
    quiet: Any = transformers_logging
    bars, verbosity, hub_verbosity = (
        quiet.is_progress_bar_enabled(),
        quiet.get_verbosity(),
        hub_logging.get_verbosity(),
    )
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    hub_logging.set_verbosity(40)  # ERROR: it would log each retry
    try:
        yield
    finally:
        quiet.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            quiet.enable_progress_bar()
