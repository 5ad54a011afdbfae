"""Attention in PyTorch's operators, sequence by sequence, over any layout of the cache.

Contiguous entries are read where they lie; others are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionBackend, AttentionPass, Selected, Variant
from slipstream.models.attention.masks import Masks
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu.latent import attend_to_latents
from slipstream.models.mixers.latent import LatentHeads


class PackedAttention(AttentionPass):
    """Stores the new keys and values behind each sequence's valid entries, and attends to these together."""

    def __init__(self, rows: ForwardBatch, pool: KVPool, first_layer: int = 0) -> None:
        """`first_layer` is where in the pool the first layer's entries are."""
        self._rows, self._first_layer = rows, first_layer
        self._pool = pool
        device = pool.features.device
        self._masks = Masks(rows, device)
        self._new = pool.index(rows.slots_on(device))
        self._entries: dict[tuple[int, int], slice | Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        rows, layer = self._rows, self._first_layer + layer
        self._pool.write(layer, self._new, key[0], value[0])
        repeats = query.shape[1] // key.shape[1]
        outputs: list[Tensor] = []
        for number in range(len(rows.groups)):
            skipped, visible = self._masks.of_group(number, variant.reach, repeats)
            chosen = None if variant.selected is None else variant.selected[number]
            if chosen is not None:
                visible = chosen[:, skipped:].repeat(repeats, 1)
            if variant.bias is not None:
                biased = self._masks.biased(number, variant.bias, skipped, visible, key.shape[1])
                visible = biased.to(query.dtype)
            keys, values = self._pool.read(layer, self._entries_of(number, skipped))
            outputs.append(
                attend(
                    query[0, :, rows.first_rows[number] : rows.first_rows[number + 1]],
                    keys,
                    values,
                    visible,
                    variant,
                )
            )
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # [heads, N, value_dim]
        return heads.transpose(0, 1)[None].contiguous()

    def attend_to_latents(
        self, layer: int, heads: LatentHeads, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        is_plain = not variant.reach and variant.softcap is None and variant.sinks is None
        is_plain &= not any(chosen is not None for chosen in variant.selected or ())
        if not heads.native_threads or not self._rows.contiguous or not is_plain:
            return super().attend_to_latents(layer, heads, query, key, value, variant)
        layer = self._first_layer + layer
        return attend_to_latents(self._rows, self._pool, layer, heads, query, key, variant.scaling)

    def select(
        self, entries: int, choose: Callable[[slice, Tensor, Callable[[Tensor], Tensor]], Tensor | None]
    ) -> Selected:
        rows, pool, chosen = self._rows, self._pool, []

        def update(number: int, keys: Tensor) -> Tensor:
            group = rows.groups[number]
            where = pool.index(group.slots[group.num_before : group.num_entries])
            pool.write(entries, where, keys[None], keys[None, :, :0])
            return pool.read(entries, self._entries_of(number, 0))[0][0]

        for number, group in enumerate(rows.groups):
            own = slice(rows.first_rows[number], rows.first_rows[number + 1])
            _, visible = self._masks.of_group(number, 0, 1)
            if visible is None:
                size = (len(group.token_ids), group.num_entries)
                visible = torch.ones(size, dtype=torch.bool, device=pool.features.device)
            chosen.append(choose(own, visible, partial(update, number)))
        return chosen

    def attend_across(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        encoded, rows, variant = self._pool.encoded, self._rows, Variant(scaling)
        assert encoded is not None, "the cache is not one of an encoder-decoder"
        outputs: list[Tensor] = []
        for number, group in enumerate(rows.groups):
            own = query[0, :, rows.first_rows[number] : rows.first_rows[number + 1]]
            outputs.append(attend(own, *encoded.read(group.owner, layer), None, variant))
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # [heads, N, value_dim]
        return heads.transpose(0, 1)[None].contiguous()

    def _entries_of(self, number: int, skipped: int) -> slice | Tensor:
        """What picks a group's entries, but the first `skipped`, out of the pool."""
        if (number, skipped) not in self._entries:
            group = self._rows.groups[number]
            self._entries[number, skipped] = self._pool.index(group.slots[skipped : group.num_entries])
        return self._entries[number, skipped]


class PackedBackend(AttentionBackend):
    """PyTorch's attention, on any device, for models that attend through the attention interface."""

    @property
    def holds_latents(self) -> bool:
        return self.traits.device.type == "cpu"

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> AttentionPass:
        return PackedAttention(rows, pool)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant) -> Tensor:
    """query [heads, n, key_dim], key/value [kv_heads, S, dim] -> [heads, n, value_dim].

    The heads that share a key head are folded into rows, so that grouped-query attention copies no keys;
    `mask`, bool [heads / kv_heads * n, S], is folded likewise; or it is what is added, [kv_heads, heads / kv_heads * n,
    S].
    """
    heads, n, _ = query.shape
    query = query.reshape(key.shape[0], heads // key.shape[0] * n, -1)  # [kv_heads, rows, key_dim]
    if variant.softcap is None and variant.sinks is None:
        output = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=variant.scaling
        )[0]
    else:
        output = _explicit_attention(query, key, value, mask, variant)
    return output.reshape(heads, n, -1)


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant
) -> Tensor:
    """The same by hand, for what the fused kernel cannot do: capped logits (Gemma 2) and sinks (gpt-oss)."""
    scores = query @ key.transpose(1, 2) * variant.scaling  # [kv_heads, rows, S]
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        kv_heads, rows, _ = scores.shape
        sinks = variant.sinks.reshape(kv_heads, -1, 1)  # [kv_heads, heads / kv_heads, 1]
        sinks = sinks.repeat_interleave(rows // sinks.shape[1], dim=1).to(scores.dtype)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return weights.to(value.dtype) @ value
