"""8-bit weights in groups of inputs, with a scale each; rows are rounded to 8 bits, group by group too, but for an
input that is far larger than the rest of its group.

With one scale for a whole row, its largest input takes the bits of all others. On SmolLM2 the first choice was then
another one at 12 % of all positions; in groups it is at 1.5 %.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel, grouped_kernel
from slipstream.models.linear.grouped import GroupedWeight
from slipstream.models.linear.rounded import TINY, RoundedFormat

_MIDDLE = 128
"""The code of 0."""


class Int8(RoundedFormat):
    """A byte a weight, and for each group of inputs of an output two bytes: as Q8_0 of llama.cpp."""

    group, bits, has_zeros = 32, 8, False
    summary = "8-bit integers in groups of 32 inputs"
    kernel: ClassVar[Kernel] = grouped_kernel(8, 32, has_zeros=False)
    bytes_per_weight = kernel.bytes_per_weight
    bytes_per_output = kernel.bytes_per_output
    weight_error = 0.015  # usual is 0.005

    def rounded(self, weight: Tensor) -> GroupedWeight:
        num_out, num_in = weight.shape
        padded = nn.functional.pad(weight.detach().float(), (0, -num_in % self.group))
        numbers = padded.view(num_out, -1, self.group)
        fractions, exponents = torch.frexp(numbers.abs().amax(-1, keepdim=True) / 127)
        scales = torch.ldexp(fractions.half().float(), exponents)  # as they are held: times a power of two
        codes = (numbers / scales.clamp_min(TINY)).round().nan_to_num(0.0) + _MIDDLE
        held = codes.to(torch.uint8).view(num_out, -1)[:, :num_in]
        return GroupedWeight(held, scales[..., 0], None, self.group, self.bits)
