"""Weights of linear layers on a device: their operator on a CPU, and the kernel, interpreted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_cases import LINEAR_CASES, TOLERANCES, FileLinear, LinearCase
from torch import Tensor, nn
from triton_process import interpreted

from slipstream.errors import ModelError
from slipstream.models.cuda.linear import DeviceWeight, ProductCut, linear
from slipstream.models.cuda.linear_codes import HeldAs
from slipstream.models.files.awq import AwqMatrix
from slipstream.models.files.block_formats import FORMATS, BlockFormat
from slipstream.models.files.compressed import CompressedMatrix, CompressedSettings
from slipstream.models.files.gptq import GptqMatrix, GptqSettings
from slipstream.models.files.grouped import Grouped, GroupedMatrix
from slipstream.models.files.stored_linear import StoredLinear
from slipstream.models.linear.formats import WeightFormat, weight_format
from slipstream.models.linear.grouped import GroupedLinear, GroupedRows, GroupedWeight
from slipstream.models.linear.layers import PackedLinear
from tests.kit.gguf_files import QUANTISED, random_blocks
from tests.kit.quantised_folders import Layer, awq, compressed, gptq

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LINEAR_CASES)
def test_the_operator_in_pytorch(name: str, seed: int) -> None:
    case = LINEAR_CASES[name]
    assert case.error(number=7, seed=seed) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_a_row_has_the_same_bits_among_any_others_in_pytorch(name: str) -> None:
    weight, rows = LINEAR_CASES[name].weight(1), LINEAR_CASES[name].rows(33)
    whole = weight(rows)
    for number in (1, 5, 17):
        assert torch.equal(weight(rows[-number:]), whole[-number:])


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_what_is_unpacked_is_what_is_multiplied_with(name: str) -> None:
    """Row i of the unit matrix reads the weight of input i."""
    case = replace(LINEAR_CASES[name], has_bias=False, rank=0)
    weight = case.weight(4)
    outputs = torch.tensor([3, 0, 66, 41])
    read = weight(torch.eye(case.num_in, dtype=case.dtype))[:, outputs].T
    assert torch.equal(weight.unpack(outputs), read)
    assert torch.equal(weight.numbers(outputs).to(case.dtype), read)


class Blocks(GroupedMatrix):
    """Random blocks of a GGUF type."""

    def __init__(self, kind: str, outputs: int, inputs: int) -> None:
        self.name, self.out_features, self.in_features = kind, outputs, inputs
        self._format: BlockFormat = next(found for found in FORMATS.values() if found.name == kind)
        self._raw = torch.from_numpy(np.ascontiguousarray(random_blocks(kind, outputs, inputs)))
        self.bits, self.group_size = self._format.bits, self._format.group_size
        self.is_symmetric, self.table = self._format.is_symmetric, self._format.table

    def part(self, begin: int, end: int) -> Grouped:
        return self._format.read(self._raw[begin:end])


def matrix(name: str) -> GroupedMatrix:
    """A matrix as a kind of file has it."""
    if name in QUANTISED:
        return Blocks(name, 72, 512)
    if name == "AWQ":
        return AwqMatrix("m", awq(Layer.random(72, 256, 64, 4, 1)), 64)
    if name.startswith("GPTQ"):
        act_order = name.endswith("act-order")
        layer = Layer.random(72, 256, 32, 8 if "8" in name else 4, 2, act_order)
        settings = {"bits": layer.bits, "group_size": 32, "desc_act": act_order}
        return GptqMatrix("m", gptq(layer), GptqSettings.read(settings))
    layer = Layer.random(72, 256, 128, 4, 3)
    of_weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}
    settings = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": of_weights, "targets": ["Linear"]}},
    }
    return CompressedMatrix("m", compressed(layer), CompressedSettings.read(settings))


FILES = [*QUANTISED, "AWQ", "GPTQ", "GPTQ, 8 bits", "GPTQ, act-order", "compressed-tensors"]


@pytest.mark.parametrize("name", FILES)
def test_the_numbers_are_those_of_the_file(name: str) -> None:
    layer = StoredLinear(matrix(name), None)
    weight = DeviceWeight.of([layer], torch.float16)
    expected = layer.numbers(0, layer.out_features)
    found = weight.numbers(torch.arange(layer.out_features))
    assert float((found - expected).abs().max()) <= 2e-6 * float(expected.abs().max())
    has_halves = name.startswith(("AWQ", "GPTQ", "Q4_0", "Q5_0", "Q8_0"))
    assert not has_halves or weight.codes.group_scales.dtype == torch.float16  # type: ignore[union-attr]
    rows = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).half()
    wanted = rows.double() @ expected.double().T
    assert float((weight(rows).double() - wanted).abs().max() / wanted.abs().max()) < 1e-3


def test_what_files_hold_takes_the_files_bytes() -> None:
    for name, most in (
        ("Q4_0", 4.6),
        ("GPTQ", 5.1),
        ("AWQ", 4.6),
        ("Q8_0", 8.6),
        ("Q4_K", 6.1),
        ("MXFP4", 8.6),
    ):
        layer = StoredLinear(matrix(name), None)
        weight = DeviceWeight.of([layer, layer, layer, layer, layer, layer, layer, layer], torch.bfloat16)
        assert weight.nbytes * 8 / weight.num_weights < most, name


@pytest.mark.parametrize("name", ["int8", "int4", "int4_g64", "int4_g128"])
def test_weights_are_rounded_as_on_a_cpu(name: str) -> None:
    fmt = weight_format(name)
    layers = [
        layer for layer in LinearCase((40, 90), 300, torch.float32).layers(5, CPU) if type(layer) is nn.Linear
    ]
    weight = DeviceWeight.of(layers, torch.float16, fmt)
    expected = [fmt.pack_torch(layer).unpack(torch.arange(layer.out_features)) for layer in layers]
    assert torch.equal(weight.numbers(torch.arange(130)), torch.cat(expected))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_0", "IQ4_NL"), ("MXFP4", "IQ4_XS"), ("Q2_K", "Q3_K")]
)
def test_layers_of_different_bits_are_held_in_the_most(kinds: tuple[str, str]) -> None:
    """As llama.cpp mixes types within one layer."""
    layers = [StoredLinear(Blocks(kind, 72, 512), None) for kind in kinds]
    weight = DeviceWeight.of(layers, torch.bfloat16)
    expected = torch.cat([layer.numbers(0, 72) for layer in layers])
    assert float((weight.numbers(torch.arange(144)) - expected).abs().max()) <= 2e-6 * float(
        expected.abs().max()
    )


def test_some_outputs_of_a_layer_are_held() -> None:
    whole = LINEAR_CASES["act-order"].layers(1, CPU)[0]
    assert isinstance(whole, GroupedLinear)
    weight = DeviceWeight.of([GroupedRows(whole, 20, 40), GroupedRows(whole, 0, 5)], torch.bfloat16)
    expected = torch.cat([whole.numbers(20, 40), whole.numbers(0, 5)])
    assert torch.allclose(weight.numbers(torch.arange(25)), expected, atol=1e-6)


def test_a_single_layer_of_the_rows_type_stays_in_its_memory() -> None:
    layer = nn.Linear(32, 70).bfloat16()
    weight = DeviceWeight.of([layer], torch.bfloat16)
    assert weight.codes.codes.data_ptr() == layer.weight.data_ptr()
    assert weight.nbytes == layer.weight.nbytes + 4 * 70
    assert (weight.in_features, weight.out_features, weight.num_weights) == (32, 70, 2240)


def test_fp8_weights_of_several_scales_are_one() -> None:
    """Blocks beside a scale an output, as layers of one file need not agree."""
    cases = [replace(LINEAR_CASES["fp8, blocks"], fp8_block=block) for block in ((128, 64), (1, 520))]
    layers = [case.layers(seed, CPU)[0] for seed, case in enumerate(cases)]
    weight = DeviceWeight.of(layers, torch.bfloat16)
    expected = torch.cat([layer.numbers(0, 40) for layer in layers if isinstance(layer, GroupedLinear)])
    assert torch.equal(weight.numbers(torch.arange(80)), expected)
    layers[0].codes[3, 5] = 127  # type: ignore[operator, index]
    with pytest.raises(ModelError, match="no numbers"):
        DeviceWeight.of(layers, torch.bfloat16)


def test_a_single_fp8_layer_stays_in_its_memory() -> None:
    layer = LINEAR_CASES["fp8, whole"].layers(0, CPU)[0]
    weight = DeviceWeight.of([layer], torch.float16)
    assert weight.codes.codes.data_ptr() == layer.codes.data_ptr()  # type: ignore[union-attr, operator]


class Unknown(WeightFormat):
    summary = "for a test"
    bytes_per_weight = 1
    name = "unknown"

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        raise NotImplementedError


def test_what_cannot_be_held_says_why() -> None:
    plain, grouped = nn.Linear(512, 72), StoredLinear(Blocks("Q4_0", 72, 512), None)
    fp8 = LINEAR_CASES["fp8, blocks"].layers(0, CPU)
    unordered = LINEAR_CASES["4 bits of 128 in float16"].layers(1, CPU)
    ordered = LINEAR_CASES["act-order"].layers(1, CPU)
    assert DeviceWeight.holds(None, [plain]) is None
    assert DeviceWeight.holds(weight_format("int4"), [grouped]) is None
    for fmt, layers, reason in (
        (None, [plain, grouped], "different kinds: Linear, StoredLinear"),
        (Unknown(), [plain], "'unknown' has no kernel"),
        (None, [unordered[0], ordered[0]], "different orders"),
        (None, [fp8[0], ordered[0]], "different kinds: FileLinear, Fp8Linear"),
    ):
        found = DeviceWeight.holds(fmt, layers)
        assert found is not None
        assert reason in found
        with pytest.raises(ModelError, match="cannot hold"):
            DeviceWeight.of(layers, torch.bfloat16, fmt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float16"):
        DeviceWeight.of([plain], torch.float32)(torch.zeros(1, 512, dtype=torch.float16))


@pytest.mark.parametrize("name", ["bfloat16", "4 bits of 32"])
def test_the_operator_can_be_traced(name: str) -> None:
    """Its shapes without numbers, and what it changes."""
    weight, held = LINEAR_CASES[name].weight(0), LINEAR_CASES[name].weight(0).codes
    arguments: tuple[Tensor | int | bool | None, ...] = (
        LINEAR_CASES[name].rows(3), held.codes, held.scales, held.group_scales, held.zeros, None,
        weight.tickets, int(held.kind), held.group, weight.out_features, False,
    )  # fmt: skip
    found = torch.library.opcheck(linear, arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(found.values()) == {"SUCCESS"}


def test_no_rows_are_no_product() -> None:
    assert LINEAR_CASES["int8"].weight(0)(LINEAR_CASES["int8"].rows(0)).shape == (0, 69)


@pytest.mark.parametrize("kind", HeldAs)
def test_no_split_is_without_inputs(kind: HeldAs) -> None:
    group = 32 if kind in (HeldAs.CODES4, HeldAs.CODES8) else 0
    for num_in in (16, 100, 1792, 4928, 14336):
        for num_out in (1, 64, 1792, 28672, 128256):
            cut = ProductCut.of(kind, group, torch.bfloat16, num_in, num_out)
            assert cut.splits <= -(-num_in // cut.block)
            assert cut.block % max(group, 1) == 0


def test_the_kernel_interpreted() -> None:
    done = interpreted("interpreted_linear.py", "-k", "products or several or tickets or (among and float32)")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_kernel_interpreted_over_all_cases() -> None:
    done = interpreted("interpreted_linear.py")
    assert done.returncode == 0, done.stdout


def test_a_group_that_is_no_power_of_two_is_cut() -> None:
    codes = torch.randint(0, 16, (8, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    layer = FileLinear(GroupedWeight(codes, torch.rand(8, 2), None, 96))
    weight = DeviceWeight.of([layer], torch.float16)
    assert weight.codes.group == 32
    assert torch.equal(weight.numbers(torch.arange(8)), layer.numbers(0, 8))
