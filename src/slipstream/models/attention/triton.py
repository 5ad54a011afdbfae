"""Attention in our Triton kernels: all rows of a pass in one operator, on a CUDA device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionPass, ModelTraits, Variant
from slipstream.models.attention.packed import PackedAttention, PackedBackend
from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda.attention_plan import AttentionPlan, plan_attention
from slipstream.models.cuda.tree_attention import Cut, Reads, Scratch, tree_attention
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.support import is_encoder_decoder, text_config

MAX_DIM = 256
"""The widest heads that the kernels take."""


class TritonAttention(AttentionPass):
    """One pass's attention over arrays on the device, which a captured pass may replace in place."""

    def __init__(self, pool: KVPool, reads: Reads, num_partials: int) -> None:
        """`num_partials` are at least those of the plan."""
        self._pool, self._reads, self._num_partials = pool, list(reads), num_partials
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        pool = self._pool
        scales = (pool.key_scales[layer], pool.value_scales[layer]) if pool.key_scales else (None, None)
        size = (query.shape[1], value.shape[3])
        if size not in self._scratch:
            self._scratch[size] = Scratch.of(self._num_partials, *size, query.device)
        sums, peaks, masses = self._scratch[size]
        rows: Tensor = tree_attention(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            pool.keys[layer], pool.values[layer], *scales, self._reads, sums, peaks, masses,
            variant.scaling, variant.reach, variant.softcap, variant.sinks,
        )  # fmt: skip
        return rows[None]


class TritonBackend(PackedBackend):
    """Our Triton kernels; passes whose slots are not consecutive attend as `packed` does."""

    executor = "cuda_kernels"
    holds_latents = False  # their keys are wider than the kernels take

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tiles: WeakKeyDictionary[KVPool, int] = WeakKeyDictionary()

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        if traits.device.type != "cuda":
            return f"our Triton kernels run on a CUDA device, and this is {traits.device.type}"
        if torch.cuda.is_available():  # a device that is planned for need not be here
            if importlib.util.find_spec("triton") is None:
                return "Triton is not installed"
            if torch.cuda.get_device_capability(traits.device) < (8, 0):
                return "our Triton kernels need a device of compute capability 8.0 or newer"
        if is_encoder_decoder(traits.config):
            return "our Triton kernels do not attend to an encoder's output"
        if _widest_head(text_config(traits.config)) > MAX_DIM:
            return f"our Triton kernels take heads of at most {MAX_DIM} numbers"
        return super().refusal(traits)

    def misfit(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> str | None:
        if any(variant.selected is not None for variant in variants):
            return "an indexer chooses what its rows attend to"
        return super().misfit(model, variants, fmt)

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> AttentionPass:
        if not rows.contiguous:
            return PackedAttention(rows, pool)
        plan = self.plan(rows, pool)
        device = pool.features.device
        numbers = torch.from_numpy(np.concatenate([plan.items.ravel(), plan.partials])).to(device)
        items, partials = numbers.tensor_split([plan.items.size])
        reads = Reads.of(rows.on(device), items.view(-1, 5), partials)
        return TritonAttention(pool, reads, plan.sizes.num_partials)

    def plan(self, rows: ForwardBatch, pool: KVPool) -> AttentionPlan:
        """The work of a pass's attention."""
        if pool not in self._tiles:
            self._tiles[pool] = _tile_rows(pool, text_config(self.traits.config).num_attention_heads)
        return plan_attention(rows, self._tiles[pool])


def plan_over(rows: ForwardBatch, pool: KVPool, num_heads: int) -> AttentionPlan:
    """The work of a pass's attention of so many heads over the entries of `pool`."""
    return plan_attention(rows, _tile_rows(pool, num_heads))


def _tile_rows(pool: KVPool, num_heads: int) -> int:
    """Rows of a tile, the same for all passes over a pool."""
    group = num_heads // min(len(keys) for keys in pool.keys)
    widest = max(entries.shape[2] for entries in (*pool.keys, *pool.values))
    return Cut.of(widest, bool(pool.key_scales)).tile // group


def _widest_head(config: Any) -> int:
    """As far as a configuration says it; some layers of a model may have wider heads than others."""
    heads = getattr(config, "num_attention_heads", None)
    usual = config.hidden_size // heads if isinstance(heads, int) and heads else 0
    # Where layers differ, Transformers lets none of these be read of the whole.
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]
    names = ("head_dim", "global_head_dim", "v_head_dim")
    named = [getattr(layer, name, None) for layer in layers for name in names]
    return max([each for each in named if isinstance(each, int)], default=usual)
