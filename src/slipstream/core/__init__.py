"""The shared vocabulary of all rooms, without tensors: what a request is, what is proposed, decided and run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILES = ("proposal", "request", "sequence", "step")


def __getattr__(name: str) -> Any:
    """Names of the vocabulary by the path at which drafters of other packages have always found them."""
    if not name.startswith("_"):
        for file in _FILES:
            found = import_module(f"slipstream.core.{file}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module 'slipstream.core' has no attribute {name!r}")
