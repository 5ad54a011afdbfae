"""Linear layers whose weights are 8-bit floating-point numbers, each times the scale of its block."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Fp8Linear(nn.Module):
    """Takes the place of an `nn.Linear` whose file holds e4m3 numbers, until it is packed for a device that keeps them.

    Activations are not rounded to FP8.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        """weight float8_e4m3fn [out, in]; scales [out / block[0], in / block[1]], rounded up."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("codes", weight.detach().view(torch.uint8), persistent=False)
        self.register_buffer("scales", scales.detach().float(), persistent=False)
        self.block = block
        self.bias = bias

    codes: Tensor
    scales: Tensor

    @property
    def group(self) -> int:
        """Inputs of an output that share a scale."""
        return self.block[1]

    def of_outputs(self) -> Tensor:
        """float32 [out, groups]: each output's scales."""
        return self.scales[torch.arange(self.out_features, device=self.scales.device) // self.block[0]]

    def numbers(self) -> Tensor:
        """float32 [out, in]"""
        scales = self.of_outputs().repeat_interleave(self.group, 1)[:, : self.in_features]
        return self.codes.view(torch.float8_e4m3fn).float() * scales

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out], with the numbers themselves."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(rows.float(), self.numbers(), bias).to(rows.dtype)
