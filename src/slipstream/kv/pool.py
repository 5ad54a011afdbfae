"""The tensors that hold keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.kv.slots import SlotMap


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
    def slots(self) -> range:
        """Every slot, for a pool that holds one sequence."""
        return range(self.num_slots)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept of a token, by slot."""
        return [*self.keys, *self.values, *([self.features] if self.features.shape[1] else [])]

    def move(self, source: int, destination: int, count: int) -> None:
        """Copy `count` entries between slots; the ranges may overlap."""
        if count == 0 or source == destination:
            return
        overlap = abs(source - destination) < count
        for tensor in self.tensors:
            entries = tensor[source : source + count]
            tensor[destination : destination + count] = entries.clone() if overlap else entries

    def gather(self, slots: SlotMap, first: int, kept: Sequence[int]) -> None:
        """Copy entry `first + kept[i]` of the sequence with these slots to its entry `first + i`, for every i."""
        in_place = 0
        while in_place < len(kept) and kept[in_place] == in_place:
            in_place += 1
        if in_place == len(kept):
            return
        destinations = self.index(slots[first + in_place : first + len(kept)])
        sources = self.index([slots[first + row] for row in kept[in_place:]])
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    def index(self, slots: SlotMap | torch.Tensor) -> slice | torch.Tensor:
        """What picks these slots out of a tensor of the pool: a slice, and so no copy, where they are contiguous."""
        if isinstance(slots, torch.Tensor):
            return slots
        if isinstance(slots, range) and slots.step == 1:
            return slice(slots.start, slots.stop)
        return torch.tensor(slots, dtype=torch.long, device=self.features.device)

    def memory_bytes(self) -> int:
        """Bytes of all keys, values and features."""
        return sum(tensor.nbytes for tensor in self.tensors)


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token costs."""
    return sum(shape.elements() for shape in shapes) * dtype.itemsize
