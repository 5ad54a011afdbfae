"""Weights that are rounded to codes in groups when they are loaded, and their layers in PyTorch's operators: what the
native kernels compute, slower."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedWeight, combined
from slipstream.models.linear.layers import PackedLinear

TINY = torch.finfo(torch.float32).tiny
_PART_WEIGHTS = 2**22
"""So many weights are rounded at a time."""
_APART_FROM = 5.0
"""An input of a row is not rounded if it is so many times the mean magnitude of its group: `kernels/groups.h`."""


class RoundedLinear(PackedLinear):
    """Rows are rounded to 8 bits, group by group, but for an input that is far larger than the rest of its group.

    The products of a group are exact sums of integers, and groups are added in one order: a row has the same bits for
    any number of rows.
    """

    def __init__(self, linear: nn.Linear, weight: GroupedWeight) -> None:
        """A `weight` of 4 or 8 bits, without a table, in place of that of `linear`."""
        super().__init__(linear)
        self.bias = linear.bias
        self._group = weight.group
        self._has_pairs = weight.bits == 4
        self._middle = 0 if weight.zeros is not None else 2 ** (weight.bits - 1)
        codes = nn.functional.pad(weight.codes, (0, -self.in_features % weight.group))
        self._codes = codes[:, ::2] | codes[:, 1::2] << 4 if self._has_pairs else codes
        largest = weight.scales.abs().amax(1, keepdim=True)
        self._factors = torch.exp2(
            largest.clamp_min(TINY).log2().floor() - 14
        )  # half floats are finest there
        self._scales = (weight.scales / self._factors).half()  # [out, groups]
        self._zeros = None if weight.zeros is None else weight.zeros.half()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, and of their scales and zeros."""
        held = (self._codes, self._factors, self._scales, self._zeros)
        return sum(int(each.nbytes) for each in held if each is not None)

    def forward(self, rows: Tensor) -> Tensor:
        flat = nn.functional.pad(rows.reshape(-1, self.in_features), (0, -self.in_features % self._group))
        total = flat.new_zeros(len(flat), self.out_features)
        for number, part in enumerate(torch.split(flat, self._group, dim=1)):
            magnitudes = part.abs()
            largest, place = magnitudes.max(-1, keepdim=True)  # [n, 1]
            stands_apart = largest > _APART_FROM * magnitudes.mean(-1, keepdim=True)
            apart = part.gather(-1, place).masked_fill(~stands_apart, 0.0)
            rest = part.scatter(-1, place, part.gather(-1, place) - apart)
            scale = rest.abs().amax(-1, keepdim=True).clamp_min(TINY) / 127
            integers = (rest / scale).round()
            numbers = self._numbers(slice(None), number)  # [out, group]
            # Of whole numbers below 2 ** 24, so no order of the additions changes a bit.
            products, alone = integers @ numbers.T, numbers.T[place[:, 0]]
            if self._zeros is not None:
                zeros = self._zeros[:, number].float()
                products = products - integers.sum(-1, keepdim=True) * zeros
                alone = alone - zeros
            total += (products * scale + apart * alone) * self._scales[:, number].float()
        total *= self._factors[:, 0]
        if self.bias is not None:
            total += self.bias
        return total.view(*rows.shape[:-1], self.out_features)

    def unpack(self, outputs: Tensor) -> Tensor:
        scales = self._scales[outputs].float()
        zeros = torch.zeros_like(scales) if self._zeros is None else self._zeros[outputs].float()
        parts = [
            (self._numbers(outputs, number) - zeros[:, number, None]) * scales[:, number, None]
            for number in range(scales.shape[1])
        ]
        return torch.cat(parts, dim=1)[:, : self.in_features] * self._factors[outputs]

    def _numbers(self, outputs: Tensor | slice, number: int) -> Tensor:
        """float32 [outputs, group]: the codes of one group, those without zeros less the middle."""
        width = self._group // 2 if self._has_pairs else self._group
        codes = self._codes[outputs, number * width : (number + 1) * width]
        if self._has_pairs:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        return codes.float() - self._middle


class RoundedFormat(WeightFormat):
    """Codes of 4 or 8 bits, each group of inputs with a scale and perhaps a zero."""

    group: ClassVar[int]
    """Inputs of a group."""
    bits: ClassVar[int]
    """Of a code."""
    has_zeros: ClassVar[bool]
    in_decoder = True  # where rows are not rounded

    @abstractmethod
    def rounded(self, weight: Tensor) -> GroupedWeight:
        """The codes of a weight [out, in], in PyTorch's operators; the native kernels find the same much faster."""

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        length = max(_PART_WEIGHTS // linear.in_features, 1)  # what is rounded takes several times its memory
        parts = [self.rounded(part) for part in torch.split(linear.weight.detach(), length)]
        return RoundedLinear(linear, combined(parts, torch.cat))
