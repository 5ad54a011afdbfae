"""Recurrences by the names of Transformers' functions."""

from __future__ import annotations

import importlib
from functools import cache

from slipstream.models.mixers.base import Recurrence

_RECURRENCES = {
    "causal_conv1d_fn": "convolution:Convolution",
    "torch_chunk_gated_delta_rule": "gated_delta:GatedDelta",
    "chunk_kimi_delta_attention": "kimi_delta:KimiDelta",
    "mamba2_chunk_scan": "state_space:StateSpace",
    "mamba_selective_scan": "selective_scan:SelectiveScan",
}
"""The classes' places in this package."""


@cache
def recurrences() -> dict[str, Recurrence]:
    """All of them, by the function that each takes the place of."""
    found: dict[str, Recurrence] = {}
    for name, place in _RECURRENCES.items():
        file, _, kind = place.partition(":")
        found[name] = getattr(importlib.import_module(f"slipstream.models.mixers.{file}"), kind)()
    return found
