"""The second way into a model: our batch poses as its `past_key_values`.

For the few families whose attention does not go through the attention interface but asks a cache for its
keys and takes a 4-D mask as it is. Keys of all sequences are packed side by side and a block-structured
mask keeps them apart, which reads every sequence's keys for every row: correct, and slower than the hook
for many sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.models.attention.packed import LayerProbe
from slipstream.models.rows import Batch


class PosedCache:
    """Looks like a Transformers cache that holds the past of every sequence in the batch."""

    def __init__(self, batch: Batch, share: int) -> None:
        self._batch = batch
        self._share = share
        slots = [slot for group in batch.groups for slot in range(group.start, group.end_slot)]
        self._slots = torch.tensor(slots, device=batch.device)  # [total]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions and mask are given, so that no offset may be added."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store the rows, [1, heads, N, dim]; returns every entry of the batch, [1, heads, total, dim].

        `share` neighbouring heads are copies of one key head; one of them is kept.
        """
        share = self._share
        pools = self._batch.store(layer_idx, key[0, ::share], value[0, ::share])
        keys, values = (pool[self._slots].transpose(0, 1).repeat_interleave(share, dim=0) for pool in pools)
        return keys[None], values[None]


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


class CacheRoute:
    """How such a model is made to use our cache. `share` heads are handed over for each distinct key head."""

    attn_implementation = "sdpa"

    def __init__(self, share: int) -> None:
        self.share = share

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        return {"past_key_values": PosedCache(batch, self.share), "attention_mask": block_mask(batch)}

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        """The same, with a probe in the batch's place."""
        return {"past_key_values": ProbedCache(probe, self.share)}


def block_mask(batch: Batch) -> Tensor:
    """bool [1, 1, N, total]: rows see what their group's mask says, and nothing of other groups."""
    num_rows = sum(len(group.token_ids) for group in batch.groups)
    total = sum(group.end_slot - group.start for group in batch.groups)
    mask = torch.zeros(num_rows, total, dtype=torch.bool, device=batch.device)
    row = entry = 0
    for group in batch.groups:
        end_row, end_entry = row + len(group.token_ids), entry + group.end_slot - group.start
        _, visible = group.view(None, 1, batch.device)
        mask[row:end_row, entry:end_entry] = True if visible is None else visible
        row, entry = end_row, end_entry
    return mask[None, None]


def _falcon(config: Any) -> CacheRoute:
    # The new decoder architecture copies its key heads for all query heads before it asks the cache.
    share = config.num_attention_heads // config.num_kv_heads if config.new_decoder_architecture else 1
    return CacheRoute(share)


CACHE_ROUTES: dict[str, Callable[[Any], CacheRoute]] = {"falcon": _falcon}
"""Model type to its route: families read and tested to honour the cache and the mask as described above."""
