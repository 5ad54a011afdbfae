"""8-bit integer weights with one scale an output; rows are rounded to 8 bits too, with one scale a row."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.layers import PackedLinear


class Int8Linear(PackedLinear):
    """An int8 linear layer on PyTorch's own integer product.

    PyTorch's dynamic quantisation would share one activation scale among all rows, and a row's result would depend on
    its neighbours. Here each row is scaled by its own maximum, and integer sums are exact: the bits are the same for
    any number of rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.bias = linear.bias
        weight = linear.weight.detach().float()
        self._scales = _row_scales(weight)[:, 0]  # [out]
        self._integers = (weight / self._scales[:, None]).round().to(torch.int8).T.contiguous()  # [in, out]

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and their scales."""
        return int(self._integers.nbytes + self._scales.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        scales = _row_scales(flat)  # [n, 1]
        integers = (flat / scales).round().to(torch.int8)
        output = torch._int_mm(integers, self._integers) * (scales * self._scales)
        if self.bias is not None:
            output += self.bias
        return output.view(*rows.shape[:-1], self.out_features)

    def unpack(self, outputs: Tensor) -> Tensor:
        return self._integers.T[outputs] * self._scales[outputs, None]


class Int8(WeightFormat):
    """A byte a weight, and for each output a float32 scale and an int32 sum."""

    summary = "8-bit integers, one scale an output and one a row of activations"
    kernel: ClassVar[Kernel] = Kernel(
        kind=1, pack="slipstream_pack_int8", bytes_per_weight=1, bytes_per_output=8
    )
    bytes_per_weight = kernel.bytes_per_weight
    bytes_per_output = kernel.bytes_per_output
    weight_error = 0.03  # usual is 0.01
    in_decoder = True  # where rows are not rounded

    def torch_unavailable(self) -> str | None:
        """Some processors add int8 products in 16 bits, which the largest ones overflow."""
        if _integer_products_are_exact():
            return None
        return "PyTorch's int8 products are not exact on this processor"

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        return Int8Linear(linear)


def _row_scales(rows: Tensor) -> Tensor:
    """[n, in] -> [n, 1]: the scale that makes each row's largest magnitude 127."""
    return rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127


@functools.cache
def _integer_products_are_exact() -> bool:
    largest = torch.full((5, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, -largest[:1].T.repeat(1, 64)) == -256 * 127 * 127).all())
