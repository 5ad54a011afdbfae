"""The shared vocabulary of all rooms, without tensors: `slipstream.core.types`, and what every room may lean on."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Names of `slipstream.core.types` by the path at which drafters of other packages have always found them."""
    if not name.startswith("_"):
        from slipstream.core import types

        if hasattr(types, name):
            return getattr(types, name)
    raise AttributeError(f"module 'slipstream.core' has no attribute {name!r}")
