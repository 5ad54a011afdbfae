"""What a pass of a model computes with, beside weights and cache: rows between its operations, and logits.

The sizes are those of the code that computes: the buffers of the CPU kernels' decoder (`kernels/decoder.h`), or what a
layer of a Transformers model has alive at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config import EngineConfig
from slipstream.kv.pool import LayerShape
from slipstream.models.cpu import threads
from slipstream.sampling.noise import SMALL_VOCABULARY

_LINE = 16
"""Floats of a cache line; the decoder keeps its rows an odd number of them apart."""
_ROW_BLOCK = 4
"""Rows that one of the decoder's threads attends for together."""
_ROW_ARRAYS_BYTES = 9 * 8
"""Of the arrays of `models.rows.Rows`, for each row."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The widths that a pass computes with."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    itemsize: int
    """Bytes of a number between the operations."""
    fused: bool
    """Whether the CPU kernels' decoder computes the whole pass."""
    quantised: bool
    """Whether it rounds its rows to 8 bits."""

    @classmethod
    def of(
        cls,
        config: Any,
        shapes: Sequence[LayerShape],
        vocab: int,
        dtype: torch.dtype,
        kernels: str,
        bits: float,
    ) -> PassSizes:
        """Of a model with this Transformers configuration, whose layers store `shapes`.

        `kernels` is as in `CausalLM.kernels`, `bits` the bytes of a weight in its format.
        """
        widest = max(shapes, key=LayerShape.elements)
        hidden = int(config.hidden_size)
        return cls(
            hidden=hidden,
            intermediate=_intermediate(config, hidden),
            num_heads=_num_heads(config, widest.num_kv_heads),
            num_kv_heads=widest.num_kv_heads,
            head_dim=max(widest.key_dim, widest.value_dim),
            vocab=vocab,
            itemsize=dtype.itemsize,
            fused=kernels == "decoder",
            quantised=bits < 2,
        )

    def row_bytes(self) -> int:
        """What a pass holds for each of its rows, without logits and scores."""
        query = self.num_heads * self.head_dim
        qkv = query + 2 * self.num_kv_heads * self.head_dim
        if self.fused:
            padded = sum(map(_stride, (self.hidden, query, self.intermediate)))
            widest = max(self.hidden, self.intermediate, query)
            floats = self.hidden + padded + qkv + self.head_dim + 1
            return 4 * floats + (widest if self.quantised else 0) + _ROW_ARRAYS_BYTES
        # A layer of a Transformers model: residual, normed rows, queries, keys and values before and after rotation,
        # what attention returns; in the MLP gate, up and their product.
        attention = 3 * self.hidden + 2 * qkv + query
        mlp = 2 * self.hidden + 3 * self.intermediate
        return self.itemsize * max(attention, mlp) + _ROW_ARRAYS_BYTES

    def score_bytes(self, num_rows: int, num_tokens: int, num_threads: int) -> int:
        """Scores and masks of `num_rows` rows of one text that has `num_tokens` tokens."""
        share = max(self.num_heads // self.num_kv_heads, 1)
        if self.fused:  # a thread's buffer grows to twice what it needed
            return num_threads * 2 * 4 * _ROW_BLOCK * share * (num_tokens + _LINE)
        rows = min(num_rows, num_tokens) * share
        return rows * num_tokens * (1 + self.itemsize)  # the mask, as it is made and as it is added

    def logit_bytes(self, num_rows: int, num_texts: int) -> int:
        """`num_rows` checked rows of `num_texts` texts: raw logits, processed ones, and what choosing tokens takes."""
        row = 4 * self.vocab
        held = 2 * row + (row if num_texts > 1 else 0)  # raw, processed, and side by side for all texts
        if self.vocab <= SMALL_VOCABULARY:
            return num_rows * (held + 4 * row)  # two arrays of 64 bits: the noise of all rows at once
        return num_rows * held + 8 * row  # row by row

    def draft_logit_bytes(self, rows_per_text: int, num_texts: int) -> int:
        """The rows of a drafter's logits for all texts, and what choosing from those of one text takes."""
        row = 4 * self.vocab
        return rows_per_text * row * (num_texts + 5)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest passes of an engine."""

    num_rows: int
    num_logit_rows: int
    context: int
    num_threads: int

    @classmethod
    def of(cls, config: EngineConfig, batch: int, context: int, max_nodes: int) -> PassLimits:
        """Where `batch` texts of up to `context` tokens run, with proposals of `max_nodes` nodes."""
        most = config.max_num_batched_tokens
        return cls(
            num_rows=min(most, batch * context),
            num_logit_rows=min(most, batch * (1 + max_nodes)),
            context=context,
            num_threads=config.num_threads or threads.available(),
        )


def activation_bytes(sizes: PassSizes, limits: PassLimits) -> int:
    """Rows between operations, and scores of attention."""
    scores = sizes.score_bytes(limits.num_rows, limits.context, limits.num_threads)
    return limits.num_rows * sizes.row_bytes() + scores


def _stride(width: int) -> int:
    """Floats from one row to the next in the decoder's buffers."""
    return ((width + _LINE - 1) // _LINE | 1) * _LINE


def _num_heads(config: Any, num_kv_heads: int) -> int:
    """Query heads; code of a checkpoint's own may call them otherwise, and then there are as many as in the cache."""
    number = getattr(config, "num_attention_heads", None)
    return number if isinstance(number, int) else num_kv_heads


def _intermediate(config: Any, hidden: int) -> int:
    """Width inside the MLP; of experts all that a row visits."""
    for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            return width
    return 4 * hidden
