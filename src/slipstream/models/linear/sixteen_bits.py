"""bfloat16 and float16 weights, widened for each product: float32 arithmetic over half the bytes.

Every 16-bit number is a float32 number too. So a checkpoint that is stored in 16 bits gives the same logits, bit for
bit, as if its weights had been widened when it was loaded. The native kernels widen them in registers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.layers import PackedLinear

WIDENED_BYTES = 2**24
"""Bytes of a large weight that are widened at a time."""


def widened_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] times [out, in] of any floating-point type -> float32 [..., out], a part of the weight at a time."""
    rows = rows.float()
    length = max(WIDENED_BYTES // (4 * weight.shape[1]), 1)
    parts = [weight[begin : begin + length] for begin in range(0, len(weight), length)]
    product = torch.cat([nn.functional.linear(rows, part.float()) for part in parts], dim=-1)
    return product if bias is None else product + bias.float()


class WidenedLinear(PackedLinear):
    """A linear layer whose weight is widened for each product by PyTorch's operators."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self.bias = linear.bias
        self._weight = linear.weight.detach().to(dtype, copy=True)

    @property
    def nbytes(self) -> int:
        return int(self._weight.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        return widened_product(rows, self._weight, self.bias)

    def unpack(self, outputs: Tensor) -> Tensor:
        return self._weight[outputs].float()


class SixteenBits(WeightFormat):
    """Two bytes a weight."""

    kernel: ClassVar[Kernel]

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        return WidenedLinear(linear, self.kernel.dtype)


class Bfloat16(SixteenBits):
    """The exponents of float32, 8 bits of precision."""

    summary = "bfloat16, widened to float32 for each product"
    kernel: ClassVar[Kernel] = Kernel(
        kind=1, pack="slipstream_pack_bfloat16", bytes_per_weight=2, dtype=torch.bfloat16
    )
    bytes_per_weight = kernel.bytes_per_weight
    stored_dtype = kernel.dtype


class Float16(SixteenBits):
    """11 bits of precision, numbers up to 65504."""

    summary = "float16, widened to float32 for each product"
    kernel: ClassVar[Kernel] = Kernel(
        kind=2, pack="slipstream_pack_float16", bytes_per_weight=2, dtype=torch.float16
    )
    bytes_per_weight = kernel.bytes_per_weight
    stored_dtype = kernel.dtype
