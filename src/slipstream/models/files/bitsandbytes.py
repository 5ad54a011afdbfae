"""bitsandbytes' layouts of checkpoints that were saved quantised: 4 bits (NF4 and FP4) and 8.

In 4 bits a code is a place in a table of 16 floats, and blocks of neighbouring numbers, counted through the whole
matrix, share a scale. The scales may be quantised in turn, by a table of 256 floats (double quantisation). In 8 bits
an output's integers share a scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget, release
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.grouped import Grouped, GroupedMatrix, check_matrix, check_shape

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
PARTS_4 = (
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES,
)
"""Names of a layer's tensors, in 4 bits."""
PARTS_8 = ("weight", "SCB", "weight_format")
"""Names of a layer's tensors, in 8 bits."""

_PART_WEIGHTS = 2**22
"""So many weights are converted at a time."""
_BY_ROWS = 0
"""The only order of integers in a file that has one byte a number, by the number of `weight_format`."""


def has_4_bits(settings: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of 4 bits, and not 8; raises `ModelError` where it says neither or both."""
    four, eight = bool(settings.get("load_in_4bit")), bool(settings.get("load_in_8bit"))
    if four == eight:
        raise ModelError(
            "bitsandbytes weights without load_in_4bit or load_in_8bit, one of which says their bits"
        )
    return four


class Bytes8Matrix(GroupedMatrix):
    """A layer of a checkpoint in 8 bits."""

    bits = 8
    is_symmetric = True

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are the layer's by `PARTS_8`; raises `ModelError` where they do not fit together."""
        if "weight" not in tensors:
            raise ModelError(f"{name} lacks weight")
        self.name, self._stored = name, tensors["weight"]
        check_matrix(f"{name}.weight", self._stored)
        self.out_features, self.in_features = self._stored.shape
        self.group_size = self.in_features
        check_shape(f"{name}.weight", self._stored, tuple(self._stored.shape), (torch.int8,))
        check_shape(f"{name}.SCB", tensors["SCB"], (self.out_features,), (torch.float32,))
        order = tensors.get("weight_format")
        if order is not None and int(order.flatten()[0]) != _BY_ROWS:
            raise ModelError(
                f"{name}: its integers lie in an order of a GPU's (weight_format): read is row by row"
            )
        self._scales = (tensors["SCB"] / 127)[:, None]  # SCB is the largest number of each output

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        codes = self._stored[begin:end].view(torch.uint8) ^ 128  # two's complement, from 0 on
        forget(self._stored[begin:end])
        return Grouped(codes, self._scales[begin:end], -128 * self._scales[begin:end], 8)

    def widened(self, begin: int, end: int) -> Tensor:
        """See `GroupedMatrix.widened`: rounded once. With scales of 32 bits a sum with a minimum would round twice."""
        numbers = self._stored[begin:end].float() * self._scales[begin:end]
        forget(self._stored[begin:end])
        return numbers


class Table4Matrix(ConvertedMatrix):
    """A layer of a checkpoint in 4 bits: no table of ours has floats, so each number is looked up while it is read."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are the layer's by `PARTS_4`; raises `ModelError` where they do not fit together."""
        state = next((tensors[part] for part in _STATES if part in tensors), None)
        for part in ("weight", "weight.absmax", "weight.quant_map"):
            if part not in tensors or state is None:
                raise ModelError(f"{name} lacks {part if part not in tensors else _STATES[0]}")
        assert state is not None
        says = _unpacked_state(name, state)
        self.kind = f"bitsandbytes {str(says['quant_type']).upper()}"
        self._shape, self._block = _sizes(name, says)
        count = self._shape[0] * self._shape[1]
        self._bytes = tensors["weight"].contiguous().view(torch.uint8).flatten()
        check_shape(f"{name}.weight", self._bytes, (-(-count // 2),), (torch.uint8,))
        check_shape(f"{name}.weight.quant_map", tensors["weight.quant_map"], (16,), (torch.float32,))
        self._table = tensors["weight.quant_map"]
        self._num_blocks = -(-count // self._block)
        self._nested = _nested(name, tensors, says, self._num_blocks)
        self._absmax = tensors["weight.absmax"]
        scale_type = torch.float32 if self._nested is None else torch.uint8
        check_shape(f"{name}.weight.absmax", self._absmax, (self._num_blocks,), (scale_type,))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._shape

    def widened(self, dtype: torch.dtype) -> Tensor:
        """See `ConvertedMatrix.widened`."""
        count = self._shape[0] * self._shape[1]
        found, every = torch.empty(count, dtype=dtype), self._scales()
        length = max(_PART_WEIGHTS // (2 * self._block), 1) * 2 * self._block  # whole blocks, and whole bytes
        for begin in range(0, count, length):
            end = min(begin + length, count)
            part = self._bytes[begin // 2 : -(-end // 2)]
            codes = torch.stack([part >> 4, part & 15], -1).flatten()[: end - begin]
            scales = every[begin // self._block : -(-end // self._block)]
            found[begin:end] = self._table[codes.int()] * scales.repeat_interleave(self._block)[: end - begin]
            release(part)
        return found.view(self._shape)

    def _scales(self) -> Tensor:
        """float32 [blocks]"""
        if self._nested is None:
            return self._absmax
        table, outer, block, offset = self._nested
        return table[self._absmax.int()] * outer.repeat_interleave(block)[: self._num_blocks] + offset


def _unpacked_state(name: str, stored: Tensor) -> dict[str, Any]:
    """What a layer says of itself: JSON, as bytes."""
    try:
        found = json.loads(bytes(stored.tolist()))
        return {"quant_type": found["quant_type"], **found}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelError(
            f"{name}.weight.quant_state is damaged: it must be a JSON object with quant_type"
        ) from None


def _sizes(name: str, says: Mapping[str, Any]) -> tuple[tuple[int, int], int]:
    """A layer's shape, and the numbers of a block."""
    shape, block = says.get("shape"), says.get("blocksize")
    numbers = [*shape, block] if isinstance(shape, list) else []
    if len(numbers) != 3 or not all(type(number) is int and number > 0 for number in numbers):
        raise ModelError(f"{name}.weight.quant_state says a shape of {shape} and blocks of {block}")
    return (numbers[0], numbers[1]), numbers[2]


def _nested(
    name: str, tensors: Mapping[str, Tensor], says: Mapping[str, Any], count: int
) -> tuple[Tensor, Tensor, int, float] | None:
    """Table, scales, numbers of a block and offset of `count` scales that are quantised themselves; None where not."""
    if "nested_offset" not in says:
        return None
    for part in ("weight.nested_absmax", "weight.nested_quant_map"):
        if part not in tensors:
            raise ModelError(f"{name} lacks {part}")
    block, offset = says.get("nested_blocksize"), says["nested_offset"]
    if type(block) is not int or block < 1 or not isinstance(offset, int | float):
        raise ModelError(
            f"{name}.weight.quant_state says nested blocks of {block}, and an offset of {offset}"
        )
    table, scales = tensors["weight.nested_quant_map"], tensors["weight.nested_absmax"]
    check_shape(f"{name}.weight.nested_quant_map", table, (256,), (torch.float32,))
    check_shape(f"{name}.weight.nested_absmax", scales, (-(-count // block),), (torch.float32,))
    return table, scales, block, offset
