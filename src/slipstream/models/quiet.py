"""Transformers without its own messages: its exceptions in one line, its bars and warnings silenced."""

from __future__ import annotations

import contextlib
import logging
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
    bars = quiet.is_progress_bar_enabled()
    loggers: tuple[Any, ...] = (quiet, hub_logging)  # the hub's would log each retry
    levels = [logger.get_verbosity() for logger in loggers]
    if bars:
        quiet.disable_progress_bar()
    for logger, level in zip(loggers, levels, strict=True):
        _set_level(logger, level, logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            _set_level(logger, logging.ERROR, level)
        if bars:
            quiet.enable_progress_bar()


def _set_level(logger: Any, now: int, wanted: int) -> None:
    if now != wanted:  # setting a level empties the caches of every logger of the process
        logger.set_verbosity(wanted)
