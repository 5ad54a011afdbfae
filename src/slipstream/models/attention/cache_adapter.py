"""The second way into a model: the pass poses as its `past_key_values`.

For the few families whose attention does not go through the attention interface but through a cache for its
keys and takes a 4-D mask as it is. Keys of all sequences are packed side by side and a block-structured
mask keeps them apart, which reads every sequence's keys for every row: correct, and slower than the hook
for many sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionBackend, AttentionPass, LayerProbe, ModelTraits, Variant
from slipstream.models.attention.masks import Masks
from slipstream.models.attention.own_cache import ADDS_MASKS, HEADS_SHARED, asks_a_cache
from slipstream.models.batch import ForwardBatch


class CacheAdapterPass(AttentionPass):
    """Looks like a Transformers cache that holds the past of every sequence in the pass."""

    def __init__(self, rows: ForwardBatch, pool: KVPool, share: int, adds_masks: bool = False) -> None:
        self._rows = rows
        self._pool = pool
        self._share = share
        self._adds_masks = adds_masks
        self._device = pool.features.device
        self._new = pool.index(rows.slots_on(self._device))
        self._entries = pool.index(rows.entry_slots)  # [total]

    def arguments(self) -> dict[str, Any]:
        mask = Masks(self._rows, self._device).of_all()
        if self._adds_masks:
            dtype = self._pool.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(dtype).min
            )
        return {"past_key_values": self, "attention_mask": mask[None, None]}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        raise NotImplementedError("a model that reads from a cache attends by itself")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions and mask are given, so that no offset may be added."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store the rows, [1, heads, N, dim]; returns every entry of the pass, [1, heads, total, dim].

        `share` neighbouring heads are copies of one key head; one of them is kept.
        """
        share = self._share
        self._pool.write(layer_idx, self._new, key[0, ::share], value[0, ::share])
        keys, values = self._pool.read(layer_idx, self._entries)
        return keys.repeat_interleave(share, dim=0)[None], values.repeat_interleave(share, dim=0)[None]


class ProbedCache:
    """Looks like an empty cache; tells `probe` what each layer would store."""

    def __init__(self, probe: LayerProbe, share: int) -> None:
        self._probe = probe
        self._share = share

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: nothing is stored."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero: the rows are the first ones."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys and the first one's index."""
        return query_length, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Record the rows, [1, heads, N, dim], and hand them back."""
        self._probe.record(layer_idx, key[:, :: self._share], value[:, :: self._share])
        return key, value


class CacheAdapterBackend(AttentionBackend):
    """The model's own attention, over keys and values that a cache hands out."""

    def __init__(self, traits: ModelTraits) -> None:
        super().__init__(traits)
        self._adds_masks = traits.config.model_type in ADDS_MASKS
        self.attn_implementation = "eager" if self._adds_masks else "sdpa"
        self._share = HEADS_SHARED[traits.config.model_type](traits.config)

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        if not asks_a_cache(traits.config):
            return f"only {', '.join(HEADS_SHARED)} is known to attend over what a cache hands out"
        return None

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> CacheAdapterPass:
        return CacheAdapterPass(rows, pool, self._share, self._adds_masks)

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        return {"past_key_values": ProbedCache(probe, self._share)}
