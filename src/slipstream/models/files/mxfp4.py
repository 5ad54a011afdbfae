"""Experts in MXFP4, as GPT-OSS is published: 4-bit floating-point numbers in blocks of 32 that share a power of two.

A folder has the experts of a layer in one tensor, outputs of gate and up in turns. Here each expert's are layers of
their own, as other checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.files.grouped import Grouped, GroupedMatrix, check_shape
from slipstream.models.linear.code_tables import FP4, halves_of_e8m0

_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stack's name to its experts' layers, whose outputs take turns."""
PARTS = tuple(f"{stack}_{part}" for stack in _STACKS for part in ("blocks", "scales"))
"""Names of the tensors of a layer's experts."""
_BLOCK = 32


class Mxfp4Matrix(GroupedMatrix):
    """A layer of one expert."""

    bits, group_size, table, is_symmetric = 4, _BLOCK, FP4, True

    def __init__(self, name: str, blocks: Tensor, scales: Tensor, first: int, step: int) -> None:
        """blocks uint8 [all outputs, blocks, 16] and scales uint8 [all outputs, blocks] of an expert, of which every
        `step`th output from `first` on is this layer's."""
        self.name, self._whole = name, (blocks, scales)
        self._blocks, self._scales = blocks[first::step], scales[first::step]
        self.out_features, self.in_features = len(self._blocks), blocks.shape[1] * _BLOCK

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        pairs = self._blocks[begin:end]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
        found = Grouped(codes, halves_of_e8m0(self._scales[begin:end]), None, 4, FP4)
        if end == self.out_features:
            for tensor in self._whole:
                forget(tensor)
        return found


def expert_matrices(name: str, tensors: Mapping[str, Tensor]) -> dict[str, GroupedMatrix]:
    """The layers of all experts of the module `name`, by their names, out of tensors that are called as `PARTS`.

    Raises `ModelError` where one is missing or has a wrong shape.
    """
    missing = [f"{name}.{part}" for part in PARTS if part not in tensors]
    if missing:
        raise ModelError(f"{missing[0]} is missing next to {name}.{next(iter(tensors))}")
    found: dict[str, GroupedMatrix] = {}
    for stack, parts in _STACKS.items():
        blocks, scales = tensors[f"{stack}_blocks"], tensors[f"{stack}_scales"]
        if blocks.ndim != 4:
            raise ModelError(f"{name}.{stack}_blocks has {blocks.ndim} dimensions, and must have 4")
        check_shape(f"{name}.{stack}_blocks", blocks, (*blocks.shape[:3], _BLOCK // 2), (torch.uint8,))
        check_shape(f"{name}.{stack}_scales", scales, tuple(blocks.shape[:3]), (torch.uint8,))
        for expert in range(len(blocks)):
            for first, part in enumerate(parts):
                own = f"{name}.{expert}.{part}"
                found[own] = Mxfp4Matrix(own, blocks[expert], scales[expert], first, len(parts))
    return found
