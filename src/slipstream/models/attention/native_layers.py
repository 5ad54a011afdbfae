"""Attention in the CPU kernels, layer by layer, in models whose other operations are Transformers' code."""

from __future__ import annotations

from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionPass, ModelTraits, Variant
from slipstream.models.attention.native import native_refusal
from slipstream.models.attention.packed import PackedAttention, PackedBackend
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import threads
from slipstream.models.cpu.attention import attend_to_heads


class NativeLayersAttention(PackedAttention):
    """The kernels attend; what they do not know (a bias by distance, a choice, slots apart) is left to PyTorch."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        is_known = variant.bias is None and not any(chosen is not None for chosen in variant.selected or ())
        if not is_known or not self._rows.contiguous:
            return super().attend(layer, query, key, value, variant)
        layer = self._first_layer + layer
        self._pool.write(layer, self._new, key[0], value[0])
        return attend_to_heads(
            self._rows,
            self._pool,
            layer,
            query,
            variant.scaling,
            variant.reach,
            variant.softcap or 0.0,
            None if variant.sinks is None else variant.sinks.float(),
            threads.available(),
        )


class NativeLayersBackend(PackedBackend):
    """The CPU kernels attend where Transformers' code runs. What they attend to a row has the same bits in any pass."""

    in_kernels = True

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        return native_refusal(traits) or super().refusal(traits)

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> AttentionPass:
        return NativeLayersAttention(rows, pool)
