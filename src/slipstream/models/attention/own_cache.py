"""Families whose attention reads keys from a cache, not Transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _falcon(config: Any) -> int:
    # The new decoder architecture copies its key heads for all query heads before it calls the cache.
    return config.num_attention_heads // config.num_kv_heads if config.new_decoder_architecture else 1


def _one(_: Any) -> int:
    return 1


HEADS_SHARED: dict[str, Callable[[Any], int]] = {
    "codegen": _one,
    "falcon": _falcon,
    "gpt_neox_japanese": _one,
    "gptj": _one,
    "xglm": _one,
}
"""By model type, how many heads a family hands over for each distinct key head. These families were read and tested to
attend over what a cache hands out, with a 4-D mask as it is given."""


ADDS_MASKS = frozenset(HEADS_SHARED) - {"falcon"}
"""Those that add a mask to scores: 0 where a row may look, and the least number elsewhere."""


def asks_a_cache(config: Any) -> bool:
    """Whether a family attends over what a cache hands out."""
    return config.model_type in HEADS_SHARED
