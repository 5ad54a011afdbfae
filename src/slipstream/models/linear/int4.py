"""4-bit weights in groups of inputs, with a scale and a zero each; rows are rounded to 8 bits, group by group too, but
for an input that is far larger than the rest of its group.

A weight is rounded to the nearest code when it is loaded, with the scale and zero that leave the least squared error.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel, blocked_kernel, grouped_kernel
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedWeight
from slipstream.models.linear.layers import PackedLinear

_TRIALS = [14.25 + 0.375 * trial for trial in range(13)]
"""Steps that a group's range is divided into, of which 15 are coded: as `kernels/fitting.h` tries them."""
_TINY = torch.finfo(torch.float32).tiny
_APART_FROM = 5.0
"""An input of a row is not rounded if it is so many times the mean magnitude of its group: `kernels/groups.h`."""


def fitted(weight: Tensor, group: int) -> GroupedWeight:
    """Codes of 4 bits for a weight [out, in], in PyTorch's operators; the native kernels do the same much faster."""
    num_out, num_in = weight.shape
    padded = nn.functional.pad(weight.detach().float(), (0, -num_in % group), mode="replicate")
    numbers = padded.view(num_out, -1, group)
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    best_scale, best_minimum = torch.zeros_like(low), low.clone()
    least = torch.full_like(low, torch.inf)
    mean = numbers.mean(-1, keepdim=True)
    for steps in _TRIALS:
        inverse = steps / (high - low).clamp_min(_TINY)
        codes = ((numbers - (low + high) / 2) * inverse + 7.5).clamp(0, 15).round()
        centred = codes - codes.mean(-1, keepdim=True)
        scale = (centred * numbers).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True).clamp_min(
            _TINY
        )
        minimum = mean - scale * codes.mean(-1, keepdim=True)
        left = (scale * codes + minimum - numbers).square().sum(-1, keepdim=True)
        better = left < least
        best_scale, best_minimum = (
            torch.where(better, scale, best_scale),
            torch.where(better, minimum, best_minimum),
        )
        least = torch.where(better, left, least)
    none = torch.zeros(num_out, padded.shape[1], dtype=torch.uint8, device=weight.device)[:, :num_in]
    found = GroupedWeight.from_minimums(none, best_scale[..., 0], best_minimum[..., 0], group)
    assert found.zeros is not None
    steps_of = numbers / torch.where(found.scales == 0, 1, found.scales)[..., None] + found.zeros[..., None]
    codes = steps_of.clamp(0, 15).round().nan_to_num(0.0).to(torch.uint8).view(num_out, -1)[:, :num_in]
    return GroupedWeight(codes, found.scales, found.zeros, group)


class Int4Linear(PackedLinear):
    """A layer of 4-bit codes in PyTorch's operators: exact sums of integers a group, added in one order."""

    def __init__(self, linear: nn.Linear, group: int) -> None:
        super().__init__(linear)
        self.bias = linear.bias
        found = fitted(linear.weight, group)
        assert found.zeros is not None
        codes = nn.functional.pad(found.codes, (0, -self.in_features % group))
        self._group = group
        self._pairs = codes[:, ::2] | codes[:, 1::2] << 4  # [out, padded in / 2]
        largest = found.scales.abs().amax(1, keepdim=True)
        self._factors = torch.exp2(
            largest.clamp_min(_TINY).log2().floor() - 14
        )  # half floats are finest there
        self._halves = torch.stack([found.scales / self._factors, found.zeros]).half()  # [2, out, groups]

    @property
    def nbytes(self) -> int:
        return int(self._pairs.nbytes + self._factors.nbytes + self._halves.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        flat = nn.functional.pad(rows.reshape(-1, self.in_features), (0, -self.in_features % self._group))
        total = flat.new_zeros(len(flat), self.out_features)
        scales, zeros = self._halves.float()
        for number, part in enumerate(torch.split(flat, self._group, dim=1)):
            magnitudes = part.abs()
            largest, place = magnitudes.max(-1, keepdim=True)  # [n, 1]
            stands_apart = largest > _APART_FROM * magnitudes.mean(-1, keepdim=True)
            apart = part.gather(-1, place).masked_fill(~stands_apart, 0.0)
            rest = part.scatter(-1, place, part.gather(-1, place) - apart)
            scale = rest.abs().amax(-1, keepdim=True).clamp_min(_TINY) / 127
            integers = (rest / scale).round()
            codes = self._codes(slice(None), number)  # [out, group]
            # Of whole numbers below 2 ** 24, so no order of the additions changes a bit.
            products = integers @ codes.T - integers.sum(-1, keepdim=True) * zeros[:, number]
            alone = apart * (codes.T[place[:, 0]] - zeros[:, number])
            total += (products * scale + alone) * scales[:, number]
        total *= self._factors[:, 0]
        if self.bias is not None:
            total += self.bias
        return total.view(*rows.shape[:-1], self.out_features)

    def unpack(self, outputs: Tensor) -> Tensor:
        scales, zeros = self._halves[:, outputs].float()
        parts = [
            (self._codes(outputs, number) - zeros[:, number, None]) * scales[:, number, None]
            for number in range(scales.shape[1])
        ]
        return torch.cat(parts, dim=1)[:, : self.in_features] * self._factors[outputs]

    def _codes(self, outputs: Tensor | slice, number: int) -> Tensor:
        """float32 [outputs, group]: of one group."""
        half = self._group // 2
        pairs = self._pairs[outputs, number * half : (number + 1) * half]
        return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1).float()


class Int4(WeightFormat):
    """Half a byte a weight; for each group of inputs of an output two bytes, and four more for eight groups."""

    group: ClassVar[int] = 32
    summary = "4-bit codes in groups of 32 inputs"
    kernel: ClassVar[Kernel] = blocked_kernel()
    bytes_per_weight = kernel.bytes_per_weight
    bytes_per_output = kernel.bytes_per_output
    head = "int8"  # on the embedded pair 4 bits there would cost half as much as in all the other layers together
    weight_error = 0.15  # usual are 0.06 to 0.1
    in_decoder = True  # where rows are not rounded

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        return Int4Linear(linear, self.group)


class Int4Groups64(Int4):
    """As `Int4`, with four bytes for each group."""

    group = 64
    summary = "4-bit codes in groups of 64 inputs"
    kernel = grouped_kernel(4, 64, has_zeros=True)
    bytes_per_weight = kernel.bytes_per_weight


class Int4Groups128(Int4):
    """As `Int4`, with the fewest scales."""

    group = 128
    summary = "4-bit codes in groups of 128 inputs"
    kernel = grouped_kernel(4, 128, has_zeros=True)
    bytes_per_weight = kernel.bytes_per_weight
