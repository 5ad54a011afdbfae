"""The tensors that hold keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.kv.slots import SlotMap
from slipstream.kv.state import StatePool
from slipstream.kv.upload import upload


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's keys and values look like in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    source: int | None = None
    """Number of the earlier layer whose entries it reads; None: it has entries of its own."""
    values_in_keys: bool = False
    """Whether a value is the first `value_dim` numbers of its key, and nothing is stored for it: latent attention."""

    def elements(self) -> int:
        """Numbers of one token, in this layer or in the one that it reads; none where it keeps a state instead."""
        return self.num_kv_heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))

    def scales(self) -> int:
        """Scales of one token in a cache of int8."""
        return self.num_kv_heads * (1 if self.values_in_keys else 2)


NO_ENTRIES = LayerShape(0, 0, 0)
"""Of a layer that stores nothing of a token."""


class EncodedKeys(Protocol):
    """Keys and values of an encoder's output, as passes of its decoder read them."""

    def read(self, owner: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """A sequence's in a layer, [kv_heads, positions, dim] each; None for those of trials."""


class KVPool:
    """Keys and values of every layer, one slot a token. Only the native kernels know their layout besides this class.

    `keys[layer]` is [kv_heads, slots, key_dim]: the entries of a head lie one behind the other, so that attention over
    consecutive slots is one stream through memory. They are rounded to `cache_dtype` once, when they are written; int8
    entries have a float32 scale each, `key_scales[layer]` [kv_heads, slots]. A layer that reads another's entries has
    that one's tensors. Where values are in the keys (`LayerShape`), `values[layer]` is a view of these, and their
    scales are the keys'. `features`, [slots, feature_width], are hidden states that a drafter wants kept with them.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_width: int = 0,
        cache_dtype: torch.dtype | None = None,
        num_scratch: int = 0,
    ) -> None:
        """`dtype` is that of features and of what is read, `cache_dtype` (None: the same) that of what is held.

        Behind the `num_slots` that sequences get are `num_scratch` more, for rows that only fill a pass.
        """
        self.encoded: EncodedKeys | None = None
        """What the layers of an encoder-decoder attend to across; None for other models."""
        self.num_slots = num_slots
        self.scratch = range(num_slots, num_slots + num_scratch)
        num_slots += num_scratch
        self.dtype = dtype
        self.cache_dtype = dtype if cache_dtype is None else cache_dtype

        self._shapes = shapes
        own = [number for number, shape in enumerate(shapes) if shape.source is None]
        stored = [shapes[number] for number in own]
        with_values = [shape for shape in stored if not shape.values_in_keys]
        key_sizes = [(shape.num_kv_heads, num_slots, shape.key_dim) for shape in stored]
        value_sizes = [(shape.num_kv_heads, num_slots, shape.value_dim) for shape in with_values]
        is_int8 = self.cache_dtype == torch.int8
        scale_sizes = [size[:2] for size in key_sizes] if is_int8 else []
        self._stacks: list[Tensor] = []
        self.keys = self._by_layer(key_sizes, self.cache_dtype, device)
        self.key_scales = self._by_layer(scale_sizes, torch.float32, device)
        values = iter(self._by_layer(value_sizes, self.cache_dtype, device))
        self.values = [
            keys[..., : shape.value_dim] if shape.values_in_keys else next(values)
            for shape, keys in zip(stored, self.keys, strict=True)
        ]
        value_scale_sizes = [size[:2] for size in value_sizes] if is_int8 else []
        scales = iter(self._by_layer(value_scale_sizes, torch.float32, device))
        self.value_scales = [
            of_keys if shape.values_in_keys else next(scales)
            for shape, of_keys in zip(stored, self.key_scales, strict=False)
        ]
        sources = [number if shape.source is None else shape.source for number, shape in enumerate(shapes)]
        for kind in (self.keys, self.values, self.key_scales, self.value_scales):
            kind[:] = [kind[own.index(source)] for source in sources] if kind else []
        self.features = torch.empty(num_slots, feature_width, dtype=dtype, device=device)
        self.states: StatePool | None = None
        """States of the recurrent layers, of a model that has some; these store no keys and values."""

    def _by_layer(
        self, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """A tensor [kv_heads, slots, ...] a layer; those of one size are parts of one stack."""
        stacks = {
            size: torch.empty(count, *size, dtype=dtype, device=device)
            for size, count in Counter(sizes).items()
        }
        self._stacks += stacks.values()
        parts = {size: iter(stack) for size, stack in stacks.items()}
        return [next(parts[size]) for size in sizes]

    @property
    def slots(self) -> range:
        """Every slot, for a pool that holds one sequence."""
        return range(self.num_slots)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept of a token: few views, of many layers each, whose first dimension is the slot."""
        features = [self.features] if self.features.shape[1] else []
        return [*(stack.movedim(2, 0) for stack in self._stacks if stack.numel()), *features]

    def write(self, layer: int, where: slice | Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the rows' keys and values, [kv_heads, N, dim] each, in the slots that `index` gave `where` for.

        Keys alone where values are in them. A layer that reads another's entries keeps nothing: they are there.
        """
        if self._shapes[layer].source is not None:
            return
        if self.cache_dtype == torch.int8:
            key, self.key_scales[layer][:, where] = quantise(key)
        self.keys[layer][:, where] = key.to(self.cache_dtype)
        if self._shapes[layer].values_in_keys:
            return
        if self.cache_dtype == torch.int8:
            value, self.value_scales[layer][:, where] = quantise(value)
        self.values[layer][:, where] = value.to(self.cache_dtype)

    def read(self, layer: int, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots, [kv_heads, n, dim] each, as `dtype`; no copy where that is how they lie."""
        keys, values = self.keys[layer][:, where].to(self.dtype), self.values[layer][:, where].to(self.dtype)
        if self.cache_dtype != torch.int8:
            return keys, values
        key_scales, value_scales = self.key_scales[layer][:, where], self.value_scales[layer][:, where]
        return keys * key_scales[..., None].to(self.dtype), values * value_scales[..., None].to(self.dtype)

    def fill(self, number: float) -> None:
        """Make every number of every entry this one. With NaN it shows who reads an entry that was not written."""
        for tensor in self.tensors:
            tensor.fill_(1 if tensor.dtype == torch.int8 else number)
        if self.states is not None:
            self.states.fill(number)

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
        moved = [slots[first + in_place : first + len(kept)], [slots[first + row] for row in kept[in_place:]]]
        destinations, sources = upload(np.array(moved, np.int64), self.features.device)
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    def index(self, slots: SlotMap | Tensor) -> slice | Tensor:
        """What picks these slots out of a tensor of the pool: a slice, and so no copy, where they are contiguous."""
        if isinstance(slots, Tensor):
            return slots
        if isinstance(slots, range) and slots.step == 1:
            return slice(slots.start, slots.stop)
        return upload(slots, self.features.device)

    def memory_bytes(self) -> int:
        """Bytes of all keys, values, features and states."""
        states = 0 if self.states is None else self.states.memory_bytes()
        return states + sum(tensor.nbytes for tensor in self.tensors)


def runnable(shapes: Sequence[LayerShape], layers: Sequence[int]) -> tuple[int, ...]:
    """Those of `layers` that can run alone: the ones whose entries are written by one of them."""
    return tuple(layer for layer in layers if shapes[layer].source in (None, *layers))


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token costs, scales included."""
    own = [shape for shape in shapes if shape.source is None]
    scales = sum(shape.scales() for shape in own) if dtype == torch.int8 else 0
    return sum(shape.elements() for shape in own) * dtype.itemsize + scales * torch.float32.itemsize


def quantise(entries: Tensor) -> tuple[Tensor, Tensor]:
    """[..., dim] -> int8 [..., dim] to the nearest, and the float32 scales [...] that undo it.

    The native kernels do the same, bit for bit. An entry with a number that is not finite gets the scale NaN, so that
    rows that attend to it are NaN as well.
    """
    numbers = entries.float()
    largest = numbers.abs().amax(dim=-1)
    usable = largest.isfinite() & (largest >= 1e-30)
    # A number divided by a tensor would be its reciprocal, times the number: rounded twice.
    inverse = torch.where(usable, torch.full_like(largest, 127.0) / largest, 0.0)
    integers = (numbers * inverse[..., None]).nan_to_num(0.0).round().to(torch.int8)
    scales = torch.where(usable, largest / 127.0, torch.where(largest.isfinite(), 0.0, torch.nan))
    return integers, scales
