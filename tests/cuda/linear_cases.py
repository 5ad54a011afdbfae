"""Random linear layers of every kind that a GPU's kernels hold, and what their products must be, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.fp8 import Fp8Linear
from slipstream.models.linear.grouped import GroupedLinear, GroupedWeight
from slipstream.models.linear.low_rank import LowRankChange

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""How far products may be from float64, as a share of the largest: the rounding of one number."""


class FileLinear(GroupedLinear):
    """A layer in groups of random codes."""

    def __init__(
        self, weight: GroupedWeight, *, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        num_out, num_in = weight.codes.shape
        super().__init__(num_in, num_out, weight.bits, weight.group, weight.zeros is not None)
        self.weight, self.bias, self.order = weight, bias, order

    def part(self, begin: int, end: int) -> GroupedWeight:
        return self.weight[begin:end]


@dataclass(frozen=True)
class LinearCase:
    """A stack of layers of one kind."""

    outputs: tuple[int, ...] = (40, 29)
    num_in: int = 520
    dtype: torch.dtype = torch.bfloat16
    fmt: str | None = None
    """A weight format; None: the layers' own."""
    group: int = 0
    """Inputs of a group, of layers that a file holds quantised."""
    bits: int = 4
    kind: str = "plain"
    """Or 'zeros', 'middle' (codes in groups, with zeros or without), 'fp8'."""
    has_bias: bool = False
    has_order: bool = False
    rank: int = 0
    fp8_block: tuple[int, int] = (128, 128)

    def layers(self, seed: int, device: torch.device) -> list[nn.Linear | GroupedLinear]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.num_in, generator=generator).int() if self.has_order else None
        return [self._layer(number, generator, order, device) for number in self.outputs]

    def _layer(
        self, num_out: int, generator: torch.Generator, order: Tensor | None, device: torch.device
    ) -> nn.Linear | GroupedLinear:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        bias = normal(num_out) if self.has_bias else None
        if self.kind == "plain":
            layer = nn.Linear(self.num_in, num_out, bias=self.has_bias)
            layer.weight.data = normal(num_out, self.num_in).to(self.dtype) * 0.05
            if bias is not None:
                assert layer.bias is not None
                layer.bias.data = bias.to(self.dtype)
            return layer.to(device)
        if self.kind == "fp8":
            rows, columns = (
                -(-n // each) for n, each in zip((num_out, self.num_in), self.fp8_block, strict=True)
            )
            numbers = normal(num_out, self.num_in).clamp(-3, 3) * torch.exp2(3 * normal(num_out, self.num_in))
            scales = normal(rows, columns).abs() * 0.01
            made = Fp8Linear(numbers.to(torch.float8_e4m3fn), scales, self.fp8_block, bias)
            return made.to(device)
        codes = torch.randint(0, 2**self.bits, (num_out, self.num_in), generator=generator).to(torch.uint8)
        sizes = (num_out, -(-self.num_in // self.group))
        scales = normal(*sizes) * 0.01
        zeros = normal(*sizes) + 2.0 ** (self.bits - 1) if self.kind == "zeros" else None
        found = FileLinear(GroupedWeight(codes, scales, zeros, self.group, self.bits), bias=bias, order=order)
        if self.rank:
            found.change = LowRankChange(
                normal(self.rank, self.num_in) * 0.1, normal(num_out, self.rank) * 0.1
            )
        return found

    def weight(self, seed: int, device: torch.device | None = None) -> DeviceWeight:
        device = device or torch.device("cpu")
        fmt = None if self.fmt is None else weight_format(self.fmt)
        return DeviceWeight.of(self.layers(seed, device), self.dtype, fmt, device)

    def rows(self, number: int, seed: int = 0, device: torch.device | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 1000)
        return torch.randn(number, self.num_in, generator=generator).to(self.dtype).to(device or "cpu")

    def expected(self, seed: int, rows: Tensor) -> Tensor:
        """The product in float64, of the numbers that the layers have themselves."""
        found = []
        fmt = None if self.fmt is None else weight_format(self.fmt)
        for layer in self.layers(seed, rows.device):
            if isinstance(layer, GroupedLinear):
                numbers = layer.widened().weight
            elif fmt is None:
                numbers = layer.weight
            else:
                packed = fmt.pack_torch(layer.cpu().float())
                numbers = packed.unpack(torch.arange(layer.out_features)).to(rows.device)
            product = rows.double() @ numbers.detach().to(rows.device).double().T
            found.append(
                product if layer.bias is None else product + layer.bias.detach().to(rows.device).double()
            )
        return torch.cat(found, 1)

    def error(self, number: int = 5, seed: int = 0, device: torch.device | None = None) -> float:
        """How far the product is from float64, as a share of the largest number."""
        rows = self.rows(number, seed, device)
        ours, expected = self.weight(seed, device)(rows).double(), self.expected(seed, rows)
        return float((ours - expected).abs().max() / expected.abs().max())


LINEAR_CASES = {
    "bfloat16": LinearCase(),
    "one layer": LinearCase((70,), has_bias=True),
    "float16": LinearCase(dtype=torch.float16, has_bias=True),
    "float32": LinearCase(dtype=torch.float32, has_bias=True),
    "int8": LinearCase(fmt="int8", has_bias=True),
    "int8 beside float16": LinearCase(dtype=torch.float16, fmt="int8"),
    "int4": LinearCase(fmt="int4"),
    "int4_g128": LinearCase(fmt="int4_g128", dtype=torch.float16),
    "fp8, blocks": LinearCase(kind="fp8"),
    "fp8, outputs": LinearCase(kind="fp8", fp8_block=(1, 520), has_bias=True),
    "fp8, whole": LinearCase((70,), kind="fp8", fp8_block=(70, 520), dtype=torch.float16),
    "4 bits of 32": LinearCase(kind="zeros", group=32),
    "4 bits of 128 in float16": LinearCase(kind="zeros", group=128, dtype=torch.float16),
    "4 bits of 96 in their middle": LinearCase(kind="middle", group=96, has_bias=True),
    "8 bits of 32 in their middle": LinearCase(kind="middle", group=32, bits=8),
    "8 bits of 48": LinearCase(kind="zeros", group=48, bits=8),
    "act-order": LinearCase(kind="zeros", group=128, has_order=True),
    "adapter": LinearCase(kind="zeros", group=64, rank=3, has_bias=True),
    "4 bits beside float32": LinearCase(kind="zeros", group=64, dtype=torch.float32),
}
