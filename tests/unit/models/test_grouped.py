"""Weights in groups: what the kernels multiply with is what the codes say, whatever the bits, groups and stacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.cpu.kernel import blocked_kernel, common_kernel, grouped_kernel
from slipstream.models.cpu.packed_weight import PackedWeight, fitted
from slipstream.models.linear.code_tables import FP4, IQ4, CodeTable
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.grouped import BlockedWeight, GroupedLinear, GroupedWeight, combined
from slipstream.models.linear.int4 import Int4, Int4Groups128
from slipstream.models.linear.int8 import Int8

FLOAT32 = weight_format("float32").kernel
KINDS = [(4, 16), (4, 32), (4, 48), (4, 64), (4, 128), (8, 16), (8, 32), (8, 128)]
ROWS = (1, 2, 3, 5, 6, 11, 16, 17, 64)


class Saved(GroupedLinear):
    """A layer whose groups are held as a file might hold them."""

    def __init__(self, weight: GroupedWeight, order: Tensor | None = None) -> None:
        has_zeros = weight.zeros is not None
        super().__init__(
            weight.codes.shape[1], len(weight), weight.bits, weight.group, has_zeros, weight.table
        )
        self.weight, self.order = weight, order

    def part(self, begin: int, end: int) -> GroupedWeight:
        return self.weight[begin:end]


def saved(num_out: int, num_in: int, bits: int, group: int, has_zeros: bool, seed: int = 0) -> Saved:
    """Random codes, with scales and zeros that are half floats."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_out, -(-num_in // group))
    codes = torch.randint(0, 2**bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.5).half().float() * 2.0**-9
    zeros = torch.randint(0, 2**bits, shape, generator=generator).float()
    return Saved(GroupedWeight(codes, scales, zeros if has_zeros else None, group, bits))


def saved_in_table(num_out: int, num_in: int, group: int, table: CodeTable, seed: int = 0) -> Saved:
    plain = saved(num_out, num_in, 4, group, False, seed).weight
    return Saved(replace(plain, table=table))


def rounded_rows(rows: Tensor, group: int) -> Tensor:
    """float64 [n, in]: rows as they are multiplied, 8 bits for each group, its largest number as it is if it is five
    times the mean magnitude."""
    padded = nn.functional.pad(rows.double(), (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    magnitudes = padded.abs()
    largest, place = magnitudes.max(-1, keepdim=True)
    kept = padded.gather(-1, place).masked_fill(largest <= 5 * magnitudes.mean(-1, keepdim=True), 0.0)
    apart = torch.zeros_like(padded).scatter(-1, place, kept)
    scales = (padded - apart).abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (((padded - apart) / scales).round() * scales + apart).flatten(1)[:, : rows.shape[1]]


def with_large_channels(num_rows: int, num_in: int) -> Tensor:
    """Rows with some channels a hundred times as large as the rest, as models have them."""
    rows = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(1))
    rows[:, 3 % num_in :: 50] *= 100
    rows[1::3, 7 % num_in :: 90] *= -30  # some of other rows
    return rows


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_products_are_those_of_the_codes_for_any_number_of_rows(
    bits: int, group: int, has_zeros: bool
) -> None:
    for num_out, num_in in [(70, 128), (33, 200), (1, 1)]:
        layer = saved(num_out, num_in, bits, group, has_zeros)
        packed = PackedWeight([layer], [None], common_kernel([layer]))
        weight = layer.weight.dequantised()
        assert torch.equal(packed.unpack(torch.arange(num_out)), weight), "the numbers are the file's"
        rows = with_large_channels(64, num_in)
        expected = rounded_rows(rows, group) @ weight.double().T
        ours = packed.multiply(rows)
        # What is left is float32 arithmetic, and quotients that rounded to the other side of a half.
        assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()
        assert (ours - expected).abs().median() <= 1e-5 * expected.abs().max()
        for count in ROWS:
            assert torch.equal(packed.multiply(rows[:count]), ours[:count])
            assert torch.equal(packed.multiply(rows[64 - count :]), ours[64 - count :])


@pytest.mark.parametrize("kind", ["int4", "int4_g64"])
def test_a_large_channel_does_not_coarsen_its_group(kind: str) -> None:
    """Real models have such channels; in PyTorch's operators too."""
    torch.manual_seed(2)
    plain = nn.Linear(256, 40, bias=False)
    even = torch.randn(16, 256)
    rows = even.clone()
    rows[:, 5] *= 300
    for native in (True, False):
        packed = weight_format(kind).pack(plain, native=native)
        weight = packed.unpack(torch.arange(40))
        with torch.inference_mode():
            errors = [(packed(each) - each @ weight.T).square().mean().sqrt() for each in (even, rows)]
        assert errors[1] < 1.5 * errors[0]


EXTREME: CodeTable = (-128, 127, 0, *range(-90, 100, 15))


@pytest.mark.parametrize("table", [FP4, IQ4, EXTREME], ids=["fp4", "iq4", "extreme"])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_codes_are_places_in_a_table(group: int, table: CodeTable) -> None:
    for num_out, num_in in [(70, 128), (33, 200), (1, 1)]:
        layer = saved_in_table(num_out, num_in, group, table)
        packed = PackedWeight([layer], [None], common_kernel([layer]))
        codes, scales = layer.weight.codes.int(), layer.weight.scales.repeat_interleave(group, 1)[:, :num_in]
        numbers = torch.tensor(table)[codes] * scales
        assert torch.equal(packed.unpack(torch.arange(num_out)), numbers)
        assert torch.equal(layer.weight.dequantised(), numbers)
        rows = with_large_channels(64, num_in)
        ours, expected = packed.multiply(rows), rounded_rows(rows, group) @ numbers.double().T
        assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()
        assert (ours - expected).abs().median() <= 1e-5 * expected.abs().max()
        for count in ROWS:
            assert torch.equal(packed.multiply(rows[:count]), ours[:count])


def test_stacks_of_other_tables_have_the_numbers_in_eight_bits() -> None:
    fp4, iq4 = saved_in_table(40, 96, 32, FP4, 1), saved_in_table(33, 96, 16, IQ4, 2)
    others = [saved(20, 96, 4, 32, False, 3), saved(20, 96, 8, 16, False, 4), saved(20, 96, 4, 16, True, 5)]
    assert common_kernel([fp4, fp4]).table == FP4
    for stack in ([fp4, iq4], [fp4, others[0]], [iq4, others[1]], [fp4, iq4, others[2]], others):
        kernel = common_kernel(stack)
        assert (kernel.bits, kernel.table) == (8, None)
        assert kernel.has_zeros == (others[2] in stack)
        packed = PackedWeight(stack, [None] * len(stack), kernel)
        weight = torch.cat([part.weight.dequantised() for part in stack])
        assert torch.equal(packed.unpack(torch.arange(len(weight))), weight)
    narrow = [others[0], others[2]]
    assert common_kernel(narrow).bits == 4
    packed = PackedWeight(narrow, [None, None], common_kernel(narrow))
    weight = torch.cat([part.weight.dequantised() for part in narrow])
    assert torch.equal(packed.unpack(torch.arange(40)), weight)


def test_stacks_are_their_parts_whatever_their_bits_and_groups() -> None:
    parts = [saved(40, 96, 4, 32, False, 1), saved(33, 96, 8, 16, True, 2), saved(70, 96, 4, 96, True, 3)]
    biases = [torch.randn(40), None, torch.randn(70)]
    rows = torch.randn(7, 96, generator=torch.Generator().manual_seed(4))
    stacked = PackedWeight(parts, biases, common_kernel(parts))
    weight = torch.cat([part.weight.dequantised() for part in parts])
    assert torch.equal(stacked.unpack(torch.arange(143)), weight)
    bias = torch.cat([torch.zeros(33) if bias is None else bias for bias in (biases[0], None, biases[2])])
    expected = rounded_rows(rows, 16) @ weight.double().T + bias
    assert (stacked.multiply(rows) - expected).abs().max() < 0.02 * expected.abs().max()


def test_gate_and_up_alternate_as_plain_weights_do() -> None:
    gate, up = saved(70, 64, 4, 32, True, 1), saved(70, 64, 4, 32, True, 2)
    ours = PackedWeight([gate, up], [None, None], common_kernel([gate, up]), interleaved=True)
    plain = PackedWeight(
        [gate.weight.dequantised(), up.weight.dequantised()], [None, None], FLOAT32, interleaved=True
    )
    assert ours.out_features == plain.out_features
    everything = torch.arange(ours.out_features)
    assert torch.equal(ours.unpack(everything), plain.unpack(everything))


def test_inputs_in_another_order_meet_their_columns() -> None:
    layer = saved(40, 96, 4, 32, True)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    packed = PackedWeight([Saved(layer.weight, order)], [None], common_kernel([layer]))
    plain = PackedWeight([layer], [None], common_kernel([layer]))
    rows = torch.randn(5, 96)
    assert not torch.equal(packed.multiply(rows), plain.multiply(rows))
    assert torch.equal(
        PackedWeight([Saved(layer.weight, order)], [None], common_kernel([layer])).multiply(rows),
        plain.multiply(rows[:, order.long()]),
    )
    weight = layer.weight.dequantised()
    back = torch.empty_like(weight)
    back[:, order.long()] = weight
    assert torch.equal(packed.unpack(torch.arange(40)), back)
    with pytest.raises(ModelError, match="inputs in different orders"):
        common_kernel([layer, Saved(layer.weight, order)])


def test_minimums_become_zeros() -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (6, 64), generator=generator, dtype=torch.uint8)
    scales = torch.tensor([[0.5, 0.25]]).repeat(6, 1)
    minimums = -scales * torch.randint(0, 16, (6, 2), generator=generator)
    scales[1, 0], minimums[1, 0] = 0.0, -3.0
    scales[2, 1], minimums[2, 1] = 1e-9, 2.0
    scales[3, 0], minimums[3, 0] = 0.0, 0.0
    weight = GroupedWeight.from_minimums(codes, scales, minimums, 32)
    expected = codes * scales.repeat_interleave(32, 1) + minimums.repeat_interleave(32, 1)
    assert torch.allclose(weight.dequantised(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_fitted_codes_leave_less_error_than_the_ends_of_the_range(group: int, has_zeros: bool) -> None:
    weight = torch.randn(64, 3 * group, generator=torch.Generator().manual_seed(6)) / 8
    found = fitted(weight, grouped_kernel(4, group, has_zeros), 2)
    numbers = weight.view(64, 3, group)
    if has_zeros:
        scales = (numbers.amax(-1) - numbers.amin(-1)) / 15
        zeros = -numbers.amin(-1) / scales
    else:
        scales, zeros = numbers.abs().amax(-1) / 7.5, torch.full((64, 3), 8.0)
    steps = (numbers / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    plain = ((steps - zeros[..., None]) * scales[..., None] - numbers).square().sum()
    ours = (found.dequantised() - weight).square().sum()
    assert ours < (0.96 if group == 32 else 0.9) * plain
    if has_zeros:
        fmt = Int4() if group == 32 else Int4Groups128()
        by_torch = (fmt.rounded(weight).dequantised() - weight).square().sum()
        assert float(by_torch) == pytest.approx(float(ours), rel=0.02)


def test_groups_without_a_spread_are_what_they_are() -> None:
    weight = torch.zeros(5, 64)
    weight[1], weight[2], weight[3, :32], weight[4, 7] = 0.3, -7e-20, 1.0, torch.nan
    for has_zeros in (False, True):
        found = fitted(weight, grouped_kernel(4, 32, has_zeros), 1).dequantised()
        assert torch.allclose(found[[0, 1, 3]], weight[[0, 1, 3]], rtol=1e-3, atol=1e-30)
        assert torch.allclose(found[2], weight[2], rtol=1e-3, atol=0)
        assert found[4, :32].isnan().any()
        assert not found[4, 32:].isnan().any()
    assert torch.allclose(Int4().rounded(weight[:4]).dequantised(), weight[:4], rtol=1e-3, atol=1e-30)


def test_eight_bits_are_the_nearest_and_odd_groups_are_told() -> None:
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(8))
    weight[0], weight[1, :32], weight[2], weight[3, 40], weight[4, 69] = (
        0.0,
        1e-33,
        1e-6 * weight[2],
        torch.inf,
        1e4,
    )
    kernel = grouped_kernel(8, 32, has_zeros=False)
    for found in (fitted(weight, kernel, 2).dequantised(), Int8().rounded(weight).dequantised()):
        assert torch.equal(found[0], weight[0])
        assert found[3, 32:64].isnan().any()
        off = (found - weight).abs()
        for row in range(5):
            for first in range(0, 70, 32):
                part = slice(first, first + 32)
                if (row, first) != (3, 32):
                    assert off[row, part].max() <= 0.54 * weight[row, part].abs().max() / 127 + 1e-30


@pytest.mark.parametrize("num_in", [256, 1024, 33, 320])
def test_blocks_are_multiplied_as_they_are_unpacked(num_in: int) -> None:
    weight = torch.randn(70, num_in, generator=torch.Generator().manual_seed(7)) / 8
    weight[3], weight[4, :32], weight[5] = 0.0, 0.25, 1e-6 * weight[5]
    packed = PackedWeight([weight], [None], blocked_kernel())
    unpacked = packed.unpack(torch.arange(70))
    groups = fitted(weight, grouped_kernel(4, 32, has_zeros=True), 2).dequantised()
    errors = [
        (found - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30) for found in (unpacked, groups)
    ]
    assert (errors[0] <= 1.1 * errors[1] + 2e-3).all(), "scales of 8 bits cost next to nothing"
    rows = with_large_channels(64, num_in)
    ours, expected = packed.multiply(rows), rounded_rows(rows, 32) @ unpacked.double().T
    assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()
    assert (ours - expected).abs().median() <= 1e-5 * expected.abs().max()
    for count in ROWS:
        assert torch.equal(packed.multiply(rows[:count]), ours[:count])
        assert torch.equal(packed.multiply(rows[64 - count :]), ours[64 - count :])


class SavedInBlocks(Saved):
    """As GGUF's Q4_K."""

    has_blocks = True

    def __init__(self, weight: BlockedWeight) -> None:
        super().__init__(weight.as_groups())
        self.blocked = weight

    def blocks(self, begin: int, end: int) -> BlockedWeight:
        return combined([self.blocked], lambda parts: parts[0][begin:end])


def saved_in_blocks(num_out: int, num_in: int, seed: int) -> SavedInBlocks:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, width: int) -> Tensor:
        return torch.randint(0, high, (num_out, width), generator=generator)

    def halves() -> Tensor:
        return ((torch.rand(num_out, -(-num_in // 256), generator=generator) + 0.5) / 256).half().float()

    codes = integers(16, num_in).to(torch.uint8)
    of_groups = integers(64, -(-num_in // 32)).to(torch.uint8), integers(64, -(-num_in // 32)).to(torch.int8)
    return SavedInBlocks(BlockedWeight(codes, *of_groups, halves(), halves()))


def test_saved_blocks_keep_their_numbers_alone_and_in_stacks() -> None:
    first, second = saved_in_blocks(70, 320, 1), saved_in_blocks(33, 320, 2)
    stack = [first, second]
    assert common_kernel(stack) == blocked_kernel()
    packed = PackedWeight(stack, [None, None], blocked_kernel())
    expected = torch.cat([each.weight.dequantised() for each in stack])
    assert torch.allclose(
        packed.unpack(torch.arange(103)), expected, rtol=0, atol=1e-3 * float(expected.abs().max())
    )
    exact = first.blocked
    blocks = torch.arange(320) // 256
    groups = torch.arange(320) // 32
    of_file = exact.scales[:, blocks] * exact.group_scales[:, groups] * exact.codes
    of_file -= exact.minimums[:, blocks] * exact.group_minimums[:, groups]
    assert torch.equal(packed.unpack(torch.arange(70)), of_file), "the numbers are the file's"
    pair = [saved_in_blocks(70, 320, 3), saved_in_blocks(70, 320, 4)]
    gated = PackedWeight(pair, [None, None], blocked_kernel(), interleaved=True)
    plain = [PackedWeight([each], [None], blocked_kernel()).unpack(torch.arange(70)) for each in pair]
    alternating = PackedWeight(plain, [None, None], FLOAT32, interleaved=True)
    everything = torch.arange(gated.out_features)
    assert torch.equal(gated.unpack(everything), alternating.unpack(everything))
    mixed = [first, saved(40, 320, 4, 32, True)]
    assert common_kernel(mixed).group == 32


def test_a_block_with_a_number_that_is_none_shows() -> None:
    weight = torch.randn(3, 512)
    weight[1, 300] = torch.inf
    rows = torch.randn(2, 512)
    found = PackedWeight([weight], [None], blocked_kernel()).multiply(rows)
    assert found.isnan().tolist() == [[False, True, False]] * 2


def test_parts_that_do_not_belong_together_are_refused() -> None:
    codes = torch.zeros(4, 100, dtype=torch.uint8)
    with pytest.raises(
        ModelError, match=r"scales of shape \[4, 3\] .* groups of 32, which would be \[4, 4\]"
    ):
        GroupedWeight(codes, torch.ones(4, 3), None, 32)
    with pytest.raises(ModelError, match=r"zeros of shape \[4, 5\]"):
        GroupedWeight(codes, torch.ones(4, 4), torch.ones(4, 5), 32)
    for bits, group in [(4, 24), (4, 256), (3, 32), (8, 8), (4, 0)]:
        with pytest.raises(ModelError, match="none that the kernels have"):
            GroupedWeight(codes, torch.ones(4, 4), None, group, bits)
