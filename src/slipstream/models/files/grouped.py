"""Quantised matrices as files hold them: integers, and for each group of inputs a scale and a minimum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.linear.code_tables import CodeTable
from slipstream.models.linear.grouped import BlockedWeight

_PART_WEIGHTS = 2**22
"""So many weights are widened at a time."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Some outputs of a quantised matrix: a weight is `code * scale + minimum` of its group of inputs, or
    `table[code] * scale`.

    A file that has integer zero points is held so too: with scales of 16 bits and codes of at most 8, `-zero * scale`
    and the sum are exact in float32, so a weight has the bits of `scale * (code - zero)`.
    """

    codes: Tensor
    """uint8 [out, in]: from 0 to `2**bits - 1`."""
    scales: Tensor
    """float32 [out, groups]"""
    minimums: Tensor | None
    """float32 [out, groups]; None where there is a table."""
    bits: int
    """Bits of a code."""
    table: CodeTable | None = None
    """16 numbers from -128 to 127, in which codes are places; None where they are numbers themselves."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def widened(self) -> Tensor:
        """float32 [out, in]: the weights, by one product and one sum, each rounded once."""
        codes = self.codes.view(len(self.codes), -1, self.group_size)
        if self.table is not None:
            numbers = torch.tensor(self.table, dtype=torch.float32)[codes.int()]
            return numbers.mul_(self.scales[..., None]).view(self.codes.shape)
        assert self.minimums is not None
        products = codes.float().mul_(self.scales[..., None])
        return products.add_(self.minimums[..., None]).view(self.codes.shape)


class GroupedMatrix(ABC):
    """A quantised matrix [out, in] in a file, of which some outputs at a time are read."""

    name: str
    """Name of its layer, as the model has it."""
    out_features: int
    in_features: int
    bits: int
    """Bits of a code."""
    group_size: int
    """Inputs that share a scale."""
    order: Tensor | None = None
    """int64 [in]: which input each column of `part` multiplies; None where they are in their order."""
    is_symmetric: bool = False
    """Whether a code of half the range is nothing everywhere: `minimum == -scale * 2 ** (bits - 1)`. So is a table."""
    table: CodeTable | None = None
    """See `Grouped`; the same of all outputs."""
    has_blocks: bool = False
    """Whether the file has eight groups in a block, as the kernels do."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Grouped:
        """The outputs from `begin` to `end`, out of the file's own bytes."""

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        """The same outputs as the kernels hold blocks of eight groups, where it `has_blocks`; else None."""
        return None

    def widened(self, begin: int, end: int) -> Tensor:
        """float32 [end - begin, in]: the weights of these outputs, their columns in the inputs' order."""
        weights = self.part(begin, end).widened()
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order.to(torch.int64), weights)

    def rows(self, indices: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: the weights of single outputs."""
        parts = [self.widened(index, index + 1) for index in indices.tolist()]
        return torch.cat(parts) if parts else torch.empty(0, self.in_features)


def bounds(matrix: GroupedMatrix) -> list[tuple[int, int]]:
    """Outputs that are widened at a time."""
    length = max(_PART_WEIGHTS // matrix.in_features, 1)
    return list(pairwise([*range(0, matrix.out_features, length), matrix.out_features]))


def whole_groups(name: str, in_features: int, group_size: int) -> int:
    """How many groups there are, where -1 is one for all inputs; raises `ModelError` where groups do not divide."""
    size = in_features if group_size == -1 else group_size
    if size < 1 or in_features % size:
        raise ModelError(f"{name}: groups of {group_size} do not divide its {in_features} inputs")
    return in_features // size


def sorted_by_group(name: str, index: Tensor, num_groups: int) -> Tensor | None:
    """int64 [in]: the inputs, group after group, by an act-order index [in]; None where they lie so already.

    Raises `ModelError` for an index that is not one of groups of one size.
    """
    index = index.to(torch.int64)
    within = bool(((index >= 0) & (index < num_groups)).all())
    sizes = torch.bincount(index, minlength=num_groups) if within else index.new_zeros(1)
    if not within or bool((sizes != len(index) // num_groups).any()):
        raise ModelError(
            f"{name}: its act-order index (g_idx) does not give every group the same number of inputs"
        )
    order = torch.argsort(index, stable=True)
    return None if bool((order[1:] > order[:-1]).all()) else order


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits]: the integers of every word, the lowest bits first.

    Where they do not fill words, they run on from one word to the next, and n words are a multiple of `word_run`'s.
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        integers: Tensor = (words[..., None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(-2)
        return integers
    bytes_ = words.contiguous().view(torch.uint8)
    eights = bytes_.view(*bytes_.shape[:-1], -1, bits)  # the bytes of eight integers
    first = torch.arange(0, 8 * bits, bits)
    low, high = (eights[..., bit // 8].int() for bit in (first, first + bits - 1))
    found: Tensor = (low | high << 8) >> (first % 8).int() & 2**bits - 1
    return found.to(torch.uint8).flatten(-2)


def word_run(bits: int) -> tuple[int, int]:
    """(integers, words) of the shortest run of whole words that holds whole integers."""
    length = math.lcm(bits, 32)
    return length // bits, length // 32


def forget_at_the_end(matrix: GroupedMatrix, end: int, *tensors: Tensor) -> None:
    """Once all outputs have been read, give back the pages of tensors whose every page holds some of each output."""
    if end == matrix.out_features:
        for tensor in tensors:
            forget(tensor)


def check_matrix(name: str, tensor: Tensor) -> None:
    """Raise `ModelError` unless a tensor of a file has two dimensions, and numbers in them."""
    if tensor.ndim != 2:
        raise ModelError(f"{name} has {tensor.ndim} dimensions")
    if not tensor.numel():
        raise ModelError(f"{name} is {tensor.shape[0]} x {tensor.shape[1]}: it holds nothing")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise `ModelError` unless a tensor of a file has this shape and one of these types."""
    if tuple(tensor.shape) != shape:
        have, want = (" x ".join(map(str, sizes)) or "one number" for sizes in (tensor.shape, shape))
        raise ModelError(f"{name} is {have}, and its layer needs {want}")
    if tensor.dtype not in dtypes:
        raise ModelError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')} numbers")
