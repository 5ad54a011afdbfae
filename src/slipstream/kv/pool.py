"""The tensors that hold keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's keys and values look like in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def elements(self) -> int:
        """Numbers stored for one token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVPool:
    """Keys and values of every layer, one slot a token: `keys[layer]` is [slots, kv_heads, key_dim].

    `features`, [slots, feature_width], are hidden states that a drafter wants kept with them.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_width: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.keys = [
            torch.empty(num_slots, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device)
            for shape in shapes
        ]
        self.values = [
            torch.empty(num_slots, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device)
            for shape in shapes
        ]
        self.features = torch.empty(num_slots, feature_width, dtype=dtype, device=device)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """All that is kept of a token, by slot."""
        return [*self.keys, *self.values, *([self.features] if self.features.shape[1] else [])]

    def move(self, source: int, destination: int, count: int) -> None:
        """Copy `count` entries between slots; the ranges may overlap."""
        if count == 0 or source == destination:
            return
        overlap = abs(source - destination) < count
        for tensor in self._tensors:
            entries = tensor[source : source + count]
            tensor[destination : destination + count] = entries.clone() if overlap else entries

    def gather(self, sources: Sequence[int], destination: int) -> None:
        """Copy the entries at the slots `sources`, in order, to `destination` and the slots after it."""
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        index = torch.tensor(sources, device=self.features.device)
        for tensor in self._tensors:
            tensor[destination : destination + len(sources)] = tensor[index]

    def memory_bytes(self) -> int:
        """Bytes of all keys, values and features."""
        return sum(tensor.nbytes for tensor in self._tensors)


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token costs."""
    return sum(shape.elements() for shape in shapes) * dtype.itemsize
