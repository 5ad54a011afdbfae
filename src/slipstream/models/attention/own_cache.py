"""Families whose attention reads keys from a cache, not Transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _falcon(config: Any) -> int:
    # The new decoder architecture copies its key heads for all query heads before it calls the cache.
    return config.num_attention_heads // config.num_kv_heads if config.new_decoder_architecture else 1


HEADS_SHARED: dict[str, Callable[[Any], int]] = {"falcon": _falcon}
"""By model type, how many heads a family hands over for each distinct key head. These families were read and tested to
attend over what a cache hands out, with a 4-D mask as it is given."""


def asks_a_cache(config: Any) -> bool:
    """Whether a family attends over what a cache hands out."""
    return config.model_type in HEADS_SHARED
