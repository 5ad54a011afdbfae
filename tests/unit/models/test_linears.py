"""Packed linear layers compute what the plain ones do, row by row, and hold their weights once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError
from slipstream.models import load_model
from slipstream.models.linear.float32 import Float32, OneDnnLinear
from slipstream.models.linear.formats import checked_format, weight_format
from slipstream.models.linear.layers import NativeLinear, PackedLinear
from slipstream.models.linear.packing import pack_linears
from slipstream.models.linear.rounded import RoundedLinear
from slipstream.models.weight_check import WeightCheck

FLOAT32: dict[str, Callable[[nn.Linear], PackedLinear]] = {
    "onednn": lambda linear: weight_format("float32").pack(linear, native=False),
    "native": lambda linear: weight_format("float32").pack(linear, native=True),
}
INT8: dict[str, Callable[[nn.Linear], PackedLinear]] = {
    "native int8": lambda linear: weight_format("int8").pack(linear, native=True),
    "torch int8": lambda linear: weight_format("int8").pack(linear, native=False),
}
INT4: dict[str, Callable[[nn.Linear], PackedLinear]] = {
    "native int4": lambda linear: weight_format("int4").pack(linear, native=True),
    "native int4_g128": lambda linear: weight_format("int4_g128").pack(linear, native=True),
    "torch int4_g64": lambda linear: weight_format("int4_g64").pack(linear, native=False),
}
ROWS = [*range(18), 33, 63, 64, 65, 130]
SHAPES = [(48, 40), (33, 70), (320, 864), (2, 1)]
"""Inputs and outputs, whole panels of the kernels' layout and broken ones."""


def half_steps(weight: Tensor) -> Tensor:
    """[out, in]: by how much a weight may be off that is rounded to the nearest of 8 bits in groups of 32."""
    groups = nn.functional.pad(weight, (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    steps = (groups.abs().amax(2) / 127).repeat_interleave(32, 1)[:, : weight.shape[1]]
    return (
        steps / 2 * (1 + 127 * 2**-11)
    )  # a scale is a half float: the largest of a group may be off by more


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FLOAT32)
def test_same_numbers_for_any_number_of_rows(kind: str, bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(*shape, bias=bias)
    packed = FLOAT32[kind](plain)
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(1, rows, shape[0])
            assert packed(x).shape == (1, rows, shape[1])
            assert torch.allclose(packed(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["native", *INT8, *INT4])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, shape: tuple[int, int]) -> None:
    """Not so for oneDNN, whose kernels differ from one number of rows to the next."""
    torch.manual_seed(2)
    packed = (FLOAT32 | INT8 | INT4)[kind](nn.Linear(*shape))
    x = torch.randn(130, shape[0]) * torch.logspace(-3, 3, 130)[:, None]
    with torch.inference_mode():
        alone = torch.cat([packed(row[None]) for row in x])
        for rows in ROWS:
            assert torch.equal(packed(x[:rows]), alone[:rows])
            assert torch.equal(packed(x[130 - rows :]), alone[130 - rows :])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*INT8, *INT4])
def test_integers_are_what_they_unpack_times_rows_of_8_bits_a_group(
    kind: str, shape: tuple[int, int]
) -> None:
    """Within 1 % of the outputs' spread, and the weights within 10 % or 1 % of theirs."""
    torch.manual_seed(3)
    plain = nn.Linear(*shape)
    x = torch.randn(9, shape[0])
    x[4] = 0.0
    x[5, 0] = 1e4  # beside it the others are not rounded coarsely
    with torch.inference_mode():
        packed = (INT8 | INT4)[kind](plain)
        weight = packed.unpack(torch.arange(shape[1]))
        ours, expected = packed(x), nn.functional.linear(x, weight, plain.bias)
    assert (ours - expected).square().mean().sqrt() < 0.01 * expected[:4].std()
    assert (weight - plain.weight).square().mean().sqrt() < (
        0.01 if kind in INT8 else 0.1
    ) * plain.weight.std()
    assert torch.equal(ours[4], plain.bias.detach()), "an empty row is no division by zero"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", INT8)
def test_int8_multiplies_integers_group_by_group(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(5)
    plain = nn.Linear(*shape, bias=False)
    x = torch.randn(7, shape[0])
    x[2, -1] = 300.0
    with torch.inference_mode():
        packed = INT8[kind](plain)
        ours, weight = packed(x), packed.unpack(torch.arange(shape[1])).double()
    expected = torch.zeros(7, shape[1], dtype=torch.float64)
    for group, part in zip(x.double().split(32, 1), weight.split(32, 1), strict=True):
        padded = nn.functional.pad(group, (0, 32 - group.shape[1]))
        largest, place = padded.abs().max(1, keepdim=True)
        alone = padded.gather(1, place) * (largest > 5 * padded.abs().mean(1, keepdim=True))
        rest = padded.scatter_add(1, place, -alone)
        scale = rest.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        rounded = ((rest / scale).round() * scale).scatter_add(1, place, alone)
        expected += rounded[:, : group.shape[1]] @ part.T
    # A float32 quotient may round to the other side of a half: one step of one product.
    assert (ours.double() - expected).abs().max() <= 1.01 * weight.abs().max() * 4 / 127
    assert (ours.double() - expected).abs().median() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_rounded_alike_by_pytorch_and_the_kernels(shape: tuple[int, int]) -> None:
    torch.manual_seed(4)
    plain = nn.Linear(*shape, bias=False)
    plain.weight.data[0] = 0.0
    every = torch.arange(shape[1])
    native, torch_form = (pack(plain).unpack(every) for pack in INT8.values())
    step = plain.weight.detach().abs().max() / 127
    assert torch.equal(native[0], torch.zeros(shape[0]))
    assert ((native - torch_form).abs() > 1e-6 * step).float().mean() < 1e-3, "but for halves of a step"
    assert ((native - torch_form).abs() <= 1.01 * step).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FLOAT32 | INT8)
def test_weights_are_read_back_as_they_are_multiplied(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(4)
    plain = nn.Linear(*shape, bias=False)
    packed = (FLOAT32 | INT8)[kind](plain)
    outputs = torch.arange(shape[1] - 1, -1, -2)
    weight = plain.weight.detach()
    half_a_step = half_steps(weight) if kind in INT8 else torch.zeros_like(weight)
    assert ((packed.unpack(outputs) - weight[outputs]).abs() <= 1.001 * half_a_step[outputs]).all()
    unpacked = packed.unpack(torch.arange(shape[1]))
    signs = torch.randint(0, 2, (5, shape[0])) * 2.0 - 1  # exact as 8-bit integers too
    with torch.inference_mode():
        assert torch.allclose(packed(torch.eye(shape[0])).T, unpacked, atol=1e-6)
        assert torch.allclose(packed(signs), signs @ unpacked.T, atol=2e-5)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, [4, 4]),
        ("int8", 2 * [1 + 2 / 32 + 4 / 64]),
        ("int4_g64", 2 * [0.5 + 4 / 64 + 4 / 64]),
    ],
)
def test_a_format_says_its_bytes(quantization: str | None, expected: list[float]) -> None:
    fmt = weight_format(quantization)
    forms = fmt.forms(nn.Linear(64, 128, bias=False))  # whole panels
    assert [form.nbytes / (64 * 128) for form in forms] == expected
    assert fmt.num_bytes(64 * 128, 128) == forms[0].nbytes


def test_a_row_is_not_changed_by_padding_or_tiling() -> None:
    """Rows beyond oneDNN's first tile and padded rows give what the tiles alone give, to the last bit."""
    torch.manual_seed(0)
    packed = OneDnnLinear(nn.Linear(48, 40))
    x = torch.randn(64 + 11, 48)
    with torch.inference_mode():
        both = packed(x)
        assert torch.equal(both[:64], packed(x[:64]))
        assert torch.equal(both[64:], packed(x[64:]))
        assert torch.equal(packed(x[:11]), packed(torch.cat([x[:11], torch.zeros(1, 48)]))[:11])


@pytest.mark.parametrize(("quantization", "kind"), [(None, OneDnnLinear), ("int8", RoundedLinear)])
def test_every_plain_linear_of_a_model_is_replaced_and_freed(
    quantization: str | None, kind: type[nn.Module]
) -> None:
    lm = load_model(EMBEDDED_TARGET, quantization=quantization, cpu_kernels="torch")
    modules = list(lm.model.modules())
    assert sum(isinstance(module, kind) for module in modules) == 6 * 7 + 1
    assert not any(type(module) is nn.Linear for module in modules)
    embedding = lm.model.get_input_embeddings().weight.numel()
    norms = 13 * 320
    packed = lm.weight_bytes - 4 * (embedding + norms)
    exact = (4 if quantization is None else 1 + 2 / 32) * (lm.num_parameters - norms)
    assert exact <= packed < exact * 1.05, "the tied embedding is held twice, nothing else"
    left = sum(parameter.numel() for parameter in lm.model.parameters())
    assert left == embedding + norms, "what is left unpacked"


def test_only_plain_float32_layers_on_a_cpu_are_packed() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.narrow, self.plain = Scaled(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
            self.device = torch.device("cpu")

    for native, kind in [(True, NativeLinear), (False, OneDnnLinear)]:
        model = Model()
        assert pack_linears(model, weight_format(None), native=native) == 1
        assert type(model.odd) is Scaled
        assert type(model.narrow) is nn.Linear
        assert type(model.plain) is kind


class _Sharing(nn.Module):
    """A layer that two parts share, one whose numbers a table reads at their own address, and one alone."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(128, 128)
        self.first, self.second = nn.Sequential(shared), nn.Sequential(shared)
        self.table, self.head, self.alone = nn.Embedding(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.table.weight = nn.Parameter(self.head.weight.data)

    def forward(self, rows: Tensor) -> Tensor:
        mixed = self.first(rows) + self.second(rows) + self.table(torch.arange(128))
        found: Tensor = self.head(mixed) + self.alone(mixed)
        return found


@pytest.mark.parametrize("native", [True, False])
def test_no_weight_that_is_still_read_is_given_back(native: bool) -> None:
    torch.manual_seed(3)
    model, rows = _Sharing(), torch.randn(128, 128)
    with torch.inference_mode():
        expected = model(rows)
        assert pack_linears(model, weight_format(None), native=native, give_back=True) == 4
        assert torch.allclose(model(rows), expected, atol=1e-4)
    assert model.first[0] is model.second[0]


def test_layers_that_share_their_weights_are_packed_once() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    model[2].weight = model[0].weight  # with a bias of its own
    rows = torch.randn(3, 16)
    expected = model(rows)
    pack_linears(model, weight_format(None))
    assert model[0] is model[1]
    assert model[2] is not model[0]
    assert torch.allclose(model(rows), expected, atol=1e-5)


def test_layers_are_packed_on_the_devices_of_their_format() -> None:
    class ForMeta(Float32):
        devices = frozenset({"meta"})

        def pack_torch(self, linear: nn.Linear) -> PackedLinear:
            return OneDnnLinear(nn.Linear(8, 8))

    def model(device: str) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8, device=device))

    packed = {
        (fmt.__name__, device): pack_linears(model(device), fmt(), native=False)
        for fmt in (Float32, ForMeta)
        for device in ("cpu", "meta")
    }
    assert packed == {
        ("Float32", "cpu"): 1,
        ("Float32", "meta"): 0,
        ("ForMeta", "cpu"): 0,
        ("ForMeta", "meta"): 1,
    }


def test_quantization_says_where_it_cannot_be_used() -> None:
    checked_format(None, torch.device("cuda"), torch.bfloat16)
    checked_format("int8", torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="for the CPU"):
        checked_format("int8", torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match="leave dtype at auto, it is bfloat16"):
        checked_format("int8", torch.device("cpu"), torch.bfloat16)


def test_products_of_a_layer_that_is_called_by_keyword_are_collected() -> None:
    torch.manual_seed(0)
    linear, rows, fmt = nn.Linear(32, 8), torch.randn(2, 3, 32), weight_format("float32")
    check, by_keyword = WeightCheck(None, fmt), WeightCheck(None, fmt)
    with torch.no_grad():
        expected = linear(rows)
        for each, call in ((check, lambda: linear(rows)), (by_keyword, lambda: linear(input=rows))):
            with each.watching({"linear": linear}, lambda _: fmt):
                assert torch.allclose(call(), expected, atol=1e-6)
            each.take_head("linear")
    assert check.head is not None
    assert by_keyword.head is not None
    assert torch.equal(by_keyword.head.products, check.head.products)
