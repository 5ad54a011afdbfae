"""16-bit weights are kept as they are stored, and every result has the bits of the same weights in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.models.cpu import pages
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.linear.float32 import Float32
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.sixteen_bits import Bfloat16, Float16, SixteenBits

FORMATS = [Bfloat16, Float16]
SHAPES = [(48, 40), (33, 70), (320, 864), (2, 1)]
"""Inputs and outputs, whole panels of the kernels' layout and broken ones."""


def linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    """A layer whose weight is of this type, and whose bias is float32."""
    made = nn.Linear(*shape, bias=bias).requires_grad_(False)
    made.weight.data = made.weight.data.to(dtype)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_have_the_bits_of_float32(
    fmt: type[SixteenBits], shape: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(1)
    narrow = linear(shape, fmt.kernel.dtype, bias)
    ours = fmt().pack(narrow, native=True)
    wide = PackedWeight([narrow.weight.float()], [narrow.bias], Float32.kernel)
    for num_rows in range(1, 65):
        rows = torch.randn(num_rows, shape[0]) * 10 ** torch.randn(num_rows, 1)
        assert torch.equal(ours(rows), wide.multiply(rows))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_number_is_widened_right(fmt: type[SixteenBits]) -> None:
    """Subnormal ones, infinities and NaN too: in products, where they are read back, and in an embedding's rows."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(fmt.kernel.dtype).view(-1, 1)  # [65536, 1]
    expected = patterns.float()
    packed = PackedWeight([patterns], [None], fmt.kernel)
    products = packed.multiply(torch.ones(1, 1)).T
    read = packed.unpack(torch.arange(2**16))
    for ours in (products, read):
        assert torch.equal(ours.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(ours[finite], expected[finite])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_stacked_and_interleaved_weights_too(fmt: type[SixteenBits], interleaved: bool) -> None:
    torch.manual_seed(2)
    weights = [torch.randn(70, 33).to(fmt.kernel.dtype) for _ in range(2)]
    ours = PackedWeight(weights, [None, None], fmt.kernel, interleaved)
    wide = PackedWeight([weight.float() for weight in weights], [None, None], Float32.kernel, interleaved)
    rows = torch.randn(9, 33)
    assert torch.equal(ours.multiply(rows), wide.multiply(rows))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("native_kernels", [True, False])
def test_other_weights_are_rounded_once(fmt: type[SixteenBits], native_kernels: bool) -> None:
    plain = nn.Linear(40, 50).requires_grad_(False)
    ours = fmt().pack(plain, native_kernels).unpack(torch.arange(50))
    assert torch.equal(ours, plain.weight.to(fmt.kernel.dtype).float())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
def test_a_weight_packed_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    kernel = weight_format(name).kernel
    assert kernel is not None
    weight, rows = torch.randn(300, 33).bfloat16(), torch.randn(3, 33)
    whole = PackedWeight([weight], [None], kernel)
    monkeypatch.setattr(pages, "SLICE_WEIGHTS", 1)
    parts = PackedWeight([weight.clone()], [None], kernel, give_back=True)
    assert torch.equal(parts.panels, whole.panels)
    assert torch.equal(parts.multiply(rows), whole.multiply(rows))


def test_a_table_that_is_moved_is_copied() -> None:
    table = torch.randn(5000, 33).bfloat16()
    expected = table.clone()
    assert torch.equal(pages.moved(table), expected)
