"""Linear layers whose weights are 8-bit floating-point numbers, each times the scale of its block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.linear.grouped import LARGEST_GROUP, GroupedLinear, GroupedWeight


class Fp8Linear(GroupedLinear):
    """A layer whose file holds e4m3 numbers, until it is packed for a device that keeps them.

    They lie where the model does. Activations are not rounded to FP8.
    """

    codes: Tensor
    scales: Tensor

    def __init__(
        self, weight: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        """weight float8_e4m3fn [out, in]; scales [out / block[0], in / block[1]], rounded up.

        Raises `ModelError` for blocks of which no groups can be made.
        """
        out_features, in_features = weight.shape
        self.block = block
        group = LARGEST_GROUP if block[1] >= in_features else math.gcd(block[1], LARGEST_GROUP)
        super().__init__(in_features, out_features, 8, group, False)
        self.register_buffer("codes", weight.detach().view(torch.uint8), persistent=False)
        self.register_buffer("scales", scales.detach().float(), persistent=False)
        self.bias = bias

    @property
    def has_one_scale(self) -> bool:
        """Whether all inputs of an output share theirs."""
        return self.block[1] >= self.in_features

    def part(self, begin: int, end: int) -> GroupedWeight:
        """There is none: the codes are no integers."""
        raise ModelError("FP8 numbers are no groups of integers")

    def of_outputs(self) -> Tensor:
        """float32 [out, blocks of inputs]: each output's scales."""
        return self.scales[torch.arange(self.out_features, device=self.scales.device) // self.block[0]]

    def numbers(self, begin: int, end: int) -> Tensor:
        scales = self.of_outputs()[begin:end].repeat_interleave(self.block[1], 1)[:, : self.in_features]
        return self.codes[begin:end].view(torch.float8_e4m3fn).float() * scales
