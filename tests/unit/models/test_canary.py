"""What the checks at load refuse: faults planted in the packing of each kind of layer, and wrong descriptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_gguf_models import tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, Ministral3Config
from transformers.models.ministral3 import modeling_ministral3

from slipstream.errors import UnsupportedModelError
from slipstream.models import adapt, load_model
from slipstream.models.attention.base import ATTENTION_NAME
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.known import Llama
from slipstream.models.families.parts import NormParts
from slipstream.models.families.registry import FAMILIES
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.grouped import GroupedLinear, GroupedRows, GroupedWeight
from slipstream.models.linear.packing import pack_linears
from slipstream.models.matrices import unread
from slipstream.models.trial import NUM_TRIAL_ROWS, far_positions, sign_rows
from slipstream.models.verdicts import LoadVerdict
from tests.kit.gguf_files import write_model
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes

pytestmark = needs_kernels

NUM_LAYERS = 2
PLACES = {"q": (0, 0), "k": (0, 1), "v": (0, 2), "o": (1, 0), "gate": (2, 0), "up": (2, 1), "down": (3, 0)}
"""Place of each matrix: in which of a layer's four packed weights, and which part of it."""
NUM_STACKS = 4
FAULTS = ("scale", "block", "layer")


class _Spoiled(GroupedRows):
    """A layer of a file, whose outputs a fault changes as they are packed."""

    def __init__(self, whole: GroupedLinear, change: Callable[[GroupedWeight], GroupedWeight]) -> None:
        super().__init__(whole, 0, whole.out_features)
        self._change, self.has_blocks = change, False

    def part(self, begin: int, end: int) -> GroupedWeight:
        return self._change(super().part(begin, end))


def spoiled(linear: Any, fault: str, other: Any) -> Any:
    """The layer with scales 1.25 times too large, with two blocks of one output swapped, or `other` in its place."""
    if fault == "layer":
        return other
    if isinstance(linear, GroupedLinear):
        if fault == "scale":
            return _Spoiled(linear, lambda part: replace(part, scales=part.scales * 1.25))
        return _Spoiled(linear, lambda part: replace(part, codes=_swapped(part.codes)))
    made = nn.Linear(linear.in_features, linear.out_features, bias=False)
    weight = linear.weight.detach()
    made.weight = nn.Parameter(weight * 1.25 if fault == "scale" else _swapped(weight), requires_grad=False)
    return made


def _kept(linear: Any) -> Any:
    """The layer as it is now: the decoder gives back what it has packed."""
    if isinstance(linear, GroupedLinear):
        return linear
    made = nn.Linear(linear.in_features, linear.out_features, bias=False)
    made.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    return made


def _swapped(rows: Tensor) -> Tensor:
    """Two blocks of 32 inputs of the fourth output have changed places."""
    rows = rows.clone()
    rows[3, :64] = rows[3, :64].roll(32)
    return rows


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """plant(matrix, fault): what the decoder packs from now on, in its second layer, is not what it was given."""
    pack = PackedModel._pack

    def planted(matrix: str, fault: str) -> None:
        seen: list[list[Any]] = []

        def packing(
            self: PackedModel, linears: Any, kernel: Any, ordered: Any = None, interleaved: bool = False
        ) -> Any:
            if type(self) is not CpuKernels:
                return pack(self, linears, kernel, ordered, interleaved)
            parts = list(linears if ordered is None else ordered)
            seen.append([_kept(part) for part in parts])
            stack, part = PLACES.get(matrix, (0, 0))
            wanted = {"head": NUM_LAYERS * NUM_STACKS, "embedding": NUM_LAYERS * NUM_STACKS + 1}
            place = wanted.get(matrix, NUM_STACKS + stack)
            if len(seen) == place + 1:
                other = seen[-2][0] if matrix == "embedding" else seen[stack][part]
                parts[part] = spoiled(parts[part], fault, other)
            return pack(self, linears, kernel, parts, interleaved)

        monkeypatch.setattr(PackedModel, "_pack", packing)

    return planted


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama of Q4_0, its embedding apart from its output layer."""
    with torch.no_grad():
        model = tiny("llama", {"num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False})
        return str(write_model(tmp_path_factory.mktemp("gguf") / "x.gguf", "llama", model, {}, {"": "Q4_0"}))


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has passed is compared again."""
    monkeypatch.setattr(LoadVerdict, "is_kept", lambda self: False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("matrix", [*PLACES, "head", "embedding"])
def test_a_fault_in_a_packed_file_is_refused(
    matrix: str, fault: str, gguf: str, plant: Callable[[str, str], None]
) -> None:
    if (matrix, fault) == ("head", "layer"):
        pytest.skip("there is one output layer")
    plant(matrix, fault)
    names = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "output", "gate": "gate_up", "up": "gate_up"}
    where = {"head": "the output layer", "embedding": "the embedding"}
    with pytest.raises(
        UnsupportedModelError, match=where.get(matrix, f"{names.get(matrix, matrix)} of layer 1")
    ):
        load_model(gguf)


def llama(**changes: Any) -> Any:
    config = LlamaConfig(**sizes(64, NUM_LAYERS, 4, 2, vocab=96, inner=96, spread=0.2, context=64), **changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4_g64", "bfloat16"])
def test_a_fault_in_a_format_is_refused(
    quantization: str | None, fault: str, plant: Callable[[str, str], None]
) -> None:
    adapt(llama(), quantization=quantization)
    plant("up", fault)
    with pytest.raises(UnsupportedModelError, match="gate_up of layer 1"):
        adapt(llama(), quantization=quantization)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(2, "attention_norm of layer 1"), (3, "mlp_norm of layer 1"), (4, "the final norm")],
)
def test_a_fault_in_a_norm_is_refused(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = PackedModel._norm
    seen: list[None] = []

    def spoil(self: PackedModel, parts: NormParts | None) -> Any:
        if type(self) is CpuKernels and parts is not None:
            seen.append(None)
            if len(seen) == number + 1:
                parts = replace(parts, weight=parts.weight.detach() * 1.001)
        return norm(self, parts)

    monkeypatch.setattr(PackedModel, "_norm", spoil)
    with pytest.raises(UnsupportedModelError, match=reason):
        adapt(llama(), quantization="int8")


def test_a_fault_of_a_layer_that_runs_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of other families do, whose linear layers alone are packed."""
    from slipstream.models.linear import packing
    from slipstream.models.linear.layers import NativeLinear

    class Wrong(NativeLinear):
        def __init__(self, linear: Any, kernel: Any) -> None:
            super().__init__(linear if linear.out_features != 96 else spoiled(linear, "block", None), kernel)

    model = llama()
    monkeypatch.setattr(FAMILIES, "names", list)
    adapt(llama(), quantization="int8")
    monkeypatch.setattr("slipstream.models.linear.formats.NativeLinear", Wrong)
    assert packing.NativeLinear is NativeLinear
    with pytest.raises(UnsupportedModelError, match=r"packed weights of .* are not the checkpoint's"):
        adapt(model, quantization="int8")


def test_rows_that_round_otherwise_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A near-tie of rounding sends a number of a row to the next integer; no comparison of the checks rounds a row."""
    rows = sign_rows(96)
    integers = rows * 127  # as any kernel rounds them, row by row or group by group
    assert torch.equal(integers.round(), integers)
    assert rows.unique().tolist() == [-1, 1]


def ministral() -> Any:
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    shape = sizes(64, NUM_LAYERS, 4, 2, vocab=96, inner=96, head_dim=16, spread=0.2, context=128)
    config = Ministral3Config(**shape, rope_parameters=rope)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def test_what_is_wrong_at_far_positions_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ministral 3 scales its queries beyond the original context, and Llama does not."""
    assert not isinstance(adapt(ministral()).executor, CpuKernels)
    FAMILIES.register("ministral3", Llama)
    try:
        with pytest.raises(UnsupportedModelError, match="its layer 0 is not what the fused decoder computes"):
            adapt(ministral())
        monkeypatch.setattr("slipstream.models.canary.far_positions", lambda *_: [])
        assert isinstance(adapt(ministral()).executor, CpuKernels)  # so only the far positions tell
    finally:
        FAMILIES.unregister("ministral3")


def test_what_is_wrong_from_one_number_of_the_configuration_to_the_next_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were queries scaled from the original context to twice of it alone, the end of the context would not tell."""
    scale = modeling_ministral3.get_llama_4_attn_scale

    def between(positions: Tensor, beta: float, original: int) -> Tensor:
        return torch.where(
            (positions < 2 * original)[:, None, :, None], scale(positions, beta, original), 1.0
        )

    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", between)
    FAMILIES.register("ministral3", Llama)
    try:
        with pytest.raises(UnsupportedModelError, match="its layer 0 is not what the fused decoder computes"):
            adapt(ministral())
        monkeypatch.setattr("slipstream.models.canary.far_positions", lambda *_: list(range(116, 128)))
        assert isinstance(adapt(ministral()).executor, CpuKernels)
    finally:
        FAMILIES.unregister("ministral3")


def test_the_text_is_repeated_where_arithmetic_may_change() -> None:
    assert far_positions(128, [2, 32, 64, 16, 128, 300], [0, 0]) == [16, 32, 64, *range(119, 128)]
    assert far_positions(128, [], []) == list(range(116, 128))
    many = far_positions(10_000, range(3, 9_000, 7), [])
    assert len(many) == len(set(many)) == NUM_TRIAL_ROWS
    assert (many[0], many[-1]) == (17, 9_999)
    assert far_positions(128, [32, 64], [0, 5]) == list(range(116, 128))  # a window counts neighbours
    assert far_positions(128, [32, 64], [0], True) == list(
        range(116, 128)
    )  # so does a bias for which tokens count
    assert far_positions(128, [32, 64], [0, -9]) == list(range(108, 120))  # a chunk begins there
    assert far_positions(128, [32, 64], [-128]) == far_positions(23, [16], [0]) == []


def test_a_layer_that_counts_by_a_caches_length_is_refused_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama 4 scales queries by where they are; `floor_scale` may lie far behind any position that is tried."""
    shape = sizes(64, 4, 4, 2, vocab=96, inner=96, head_dim=16, spread=0.2, context=128)
    config = Llama4TextConfig(
        **shape,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=8,
        no_rope_layers=[1, 0, 1, 0],
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    monkeypatch.setattr("slipstream.models.attention.counted.COUNTING", frozenset())
    with pytest.raises(UnsupportedModelError, match="count the tokens before them by the length of a cache"):
        adapt(model)
    monkeypatch.undo()
    adapt(model)


class Router(nn.Module):
    """As LongCat-Flash routes: the layer's weight is read, and the layer never called. Hunyuan MoE calls it too."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls
        self.classifier = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.classifier.weight
        scores = self.classifier(rows) if self.calls else nn.functional.linear(rows, weight)
        chosen = int(scores.to(weight.dtype).sum(0).argmax())
        made: Tensor = self.experts[chosen](rows)
        return made


@pytest.mark.parametrize("calls", [False, True])
def test_layers_whose_weight_other_code_reads_stay_plain(calls: bool) -> None:
    torch.manual_seed(0)
    model, rows = Router(calls).requires_grad_(False), torch.randn(3, 32)
    expected = model(rows)
    with unread(model) as used:
        model(rows)
    assert len(used.only_called) == 1
    packed = pack_linears(model, weight_format("float32"), called=used.only_called)
    assert packed == 4  # experts without a row among them
    assert type(model.classifier) is nn.Linear
    assert torch.allclose(model(rows), expected, atol=1e-5)
