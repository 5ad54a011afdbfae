"""What replaces a pass while a model is tried out."""

from __future__ import annotations

from torch import Tensor

from slipstream.kv.pool import LayerShape
from slipstream.models.attention.base import Variant


class LayerProbe:
    """Records what each layer would store, how it attends, and the mask that it was given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.masks: dict[int, tuple[Variant, Tensor | None]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, mask: Tensor | None
    ) -> Tensor:
        """As `AttentionPass.attend`, with the layer's mask; the answer is all zeros."""
        self.record(layer, key, value)
        self.masks[layer] = (variant, mask)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key/value [1, kv_heads, N, dim], as they would be stored."""
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
