"""4-bit weights in groups of inputs, with a scale and a zero each; rows are rounded to 8 bits, group by group too, but
for an input that is far larger than the rest of its group.

A weight is rounded to the nearest code when it is loaded, with the scale and zero that leave the least squared error.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel, blocked_kernel, grouped_kernel
from slipstream.models.linear.grouped import GroupedWeight
from slipstream.models.linear.rounded import TINY, RoundedFormat

_TRIALS = [14.25 + 0.375 * trial for trial in range(13)]
"""Steps that a group's range is divided into, of which 15 are coded: as `kernels/fitting.h` tries them."""


class Int4(RoundedFormat):
    """Half a byte a weight; for each group of inputs of an output two bytes, and four more for eight groups."""

    group, bits, has_zeros = 32, 4, True
    summary = "4-bit codes in groups of 32 inputs"
    kernel: ClassVar[Kernel] = blocked_kernel()
    bytes_per_weight = kernel.bytes_per_weight
    bytes_per_output = kernel.bytes_per_output
    head = "int8"  # on the embedded pair 4 bits there would cost half as much as in all the other layers together
    weight_error = 0.15  # usual are 0.06 to 0.1

    def rounded(self, weight: Tensor) -> GroupedWeight:
        group = self.group
        num_out, num_in = weight.shape
        padded = nn.functional.pad(weight.detach().float(), (0, -num_in % group), mode="replicate")
        numbers = padded.view(num_out, -1, group)
        low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
        best_scale, best_minimum = torch.zeros_like(low), low.clone()
        least = torch.full_like(low, torch.inf)
        mean = numbers.mean(-1, keepdim=True)
        for steps in _TRIALS:
            inverse = steps / (high - low).clamp_min(TINY)
            codes = ((numbers - (low + high) / 2) * inverse + 7.5).clamp(0, 15).round()
            centred = codes - codes.mean(-1, keepdim=True)
            scale = (centred * numbers).sum(-1, keepdim=True) / centred.square().sum(
                -1, keepdim=True
            ).clamp_min(TINY)
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
        steps_of = (
            numbers / torch.where(found.scales == 0, 1, found.scales)[..., None] + found.zeros[..., None]
        )
        codes = steps_of.clamp(0, 15).round().nan_to_num(0.0).to(torch.uint8).view(num_out, -1)[:, :num_in]
        return GroupedWeight(codes, found.scales, found.zeros, group)


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
