"""A weight format of somebody else's runs everywhere that the built-in ones do, through public registration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.models import load_model
from slipstream.models.linear.formats import (
    WEIGHT_FORMATS,
    WeightFormat,
    weight_format,
)
from slipstream.models.linear.layers import PackedLinear
from slipstream.testing.weight_formats import check_weight_format

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Widened(PackedLinear):
    """bfloat16 weights, widened to float32 for each product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._weight = linear.weight.detach().bfloat16()
        self.bias = linear.bias

    @property
    def nbytes(self) -> int:
        return int(self._weight.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self._weight.float(), self.bias)

    def unpack(self, outputs: Tensor) -> Tensor:
        return self._weight[outputs].float()


class Toy(WeightFormat):
    """Two bytes a weight."""

    summary = "bfloat16, widened"
    bytes_per_weight = 2
    weight_error = 0.1

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        return Widened(linear)


class Impossible(Toy):
    """No form of it works here."""

    def torch_unavailable(self) -> str | None:
        return "this processor has no toys"


class Wrong(Toy):
    """Not what the checkpoint holds, by far."""

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        nn.init.ones_(linear.weight)
        return Widened(linear)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    WEIGHT_FORMATS.register("toy", Toy)
    yield
    WEIGHT_FORMATS.unregister("toy")


def test_it_runs_as_the_targets_weights() -> None:
    llm = LLM(quantization="toy", speculative_config={"method": "off"})
    (answer,) = llm.generate(["The quick brown fox"], GREEDY)
    assert len(answer.outputs[0].token_ids) == 24
    model = llm.engine.model
    assert model.runs_as.startswith("toy weights, float32 on cpu")
    linears = sum(part.in_features * part.out_features for part in widened(model.model))
    assert len(widened(model.model)) == 6 * 7 + 1
    other = sum(parameter.nbytes for parameter in model.model.parameters())
    plan = llm.engine.memory_plan
    assert plan.target_bytes == 2 * linears + other
    assert "toy" in str(plan)


def widened(module: nn.Module) -> list[Widened]:
    return [part for part in module.modules() if isinstance(part, Widened)]


def test_it_drafts_for_the_target_whose_weights_it_holds() -> None:
    cls, options = validate(SpeculativeConfig.from_short("self:toy"))
    assert options.quantization == "toy"
    spec = {"method": "self", "quantization": "toy", "num_speculative_tokens": 4}
    llm = LLM(dtype="float32", speculative_config=spec)
    plain = LLM(speculative_config={"method": "off"})
    (answer,), (expected,) = (each.generate(["The quick brown fox"], GREEDY) for each in (llm, plain))
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert answer.metrics.acceptance_rate > 0.8
    assert isinstance(llm.engine.drafter, cls)
    assert widened(llm.engine.drafter.model.model)  # type: ignore[attr-defined]


def test_a_head_is_held_in_it_too() -> None:
    llm = LLM(speculative_config={"method": "eagle3", "model": EMBEDDED_EAGLE3, "quantization": "toy"})
    assert widened(llm.engine.drafter.head)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["toy", f"{__name__}:Toy"])
def test_info_names_it(name: str) -> None:
    result = CliRunner().invoke(app, ["info", "--quantization", name, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["quantization"] == name
    assert found["runs_as"].startswith(f"{name} weights")


def test_only_a_smaller_copy_drafts() -> None:
    for target, draft in [("toy", "toy"), ("int8", "toy"), ("float32", "float32"), (None, "float16")]:
        with pytest.raises(ConfigError, match=f"the target is {target or 'float16'} already"):
            LLM(quantization=target, speculative_config={"method": "self", "quantization": draft})
    LLM(quantization="toy", speculative_config={"method": "self", "quantization": "int8"})


def test_float32_can_be_asked_for() -> None:
    lm = load_model(EMBEDDED_TARGET, quantization="float32")
    assert lm.quantization is None
    assert lm.weight_bytes == load_model(EMBEDDED_TARGET, dtype="float32").weight_bytes


def test_an_unknown_format_raises_everywhere() -> None:
    self_draft = SpeculativeConfig.from_short("self:toys")
    for make in (
        lambda: weight_format("toys"),
        lambda: LLM(quantization="toys"),
        lambda: load_model(EMBEDDED_TARGET, quantization="toys", cpu_kernels="native"),
        lambda: load_model(EMBEDDED_TARGET, quantization="toys", cpu_kernels="torch"),
        lambda: validate(self_draft),
    ):
        with pytest.raises(ConfigError, match=r"unknown .*quantization 'toys'; formats: .*, toy$"):
            make()


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of"):
        weight_format(f"{__name__}:Widened")
    with pytest.raises(ConfigError, match="cannot be loaded: No module named"):
        load_model(EMBEDDED_TARGET, quantization="no_such_module:Format")
    with pytest.raises(ConfigError, match="'int8' exists already"):
        WEIGHT_FORMATS.register("int8", Toy)


def test_a_format_that_this_machine_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this processor has no toys; quantization '.*' cannot be used"):
        load_model(EMBEDDED_TARGET, quantization=f"{__name__}:Impossible")


def test_weights_that_are_not_the_checkpoints_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"packed weights of model\.layers\.0\.self_attn\.q_proj are not"
    ):
        load_model(EMBEDDED_TARGET, quantization=f"{__name__}:Wrong")


def test_it_is_for_the_devices_that_it_names() -> None:
    with pytest.raises(ConfigError, match="quantization 'toy' is for the CPU; on cuda leave it out"):
        weight_format("toy").check(torch.device("cuda"), torch.float32)


# --- the conformance kit --------------------------------------------------------------------------------------


class Neighbourly(Widened):
    """One scale for all rows together, as in PyTorch's dynamic quantisation."""

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax() / 127 if rows.numel() else 1.0
        return super().forward((rows / scale).round() * scale)


class Flattening(Widened):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.reshape(-1, self.in_features))


class Misread(Widened):
    def unpack(self, outputs: Tensor) -> Tensor:
        return super().unpack(outputs.flip(0))


class Heavier(Toy):
    bytes_per_weight = 3


@pytest.mark.parametrize("fmt", [weight_format("int8"), Toy()])
def test_formats_keep_the_contract(fmt: WeightFormat) -> None:
    check_weight_format(fmt, same_bits=fmt.kernel is not None)


@pytest.mark.parametrize(("name", "max_error"), [("float32", 1e-5), ("bfloat16", 0.01), ("float16", 1e-3)])
def test_floating_point_keeps_the_contract_to_the_rounding_of_its_kernels(
    name: str, max_error: float
) -> None:
    check_weight_format(weight_format(name), max_error=max_error, same_bits=False)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (Neighbourly, "depends on the .* other rows of the pass"),
        (Flattening, r"makes \(0, 128\) of 0 rows in a batch of 1"),
        (Misread, "unpacks is not what it multiplies with"),
    ],
)
def test_the_kit_finds_what_breaks_the_contract(layer: type[PackedLinear], sentence: str) -> None:
    class Broken(Toy):
        def pack_torch(self, linear: nn.Linear) -> PackedLinear:
            return layer(linear)

    with pytest.raises(AssertionError, match=sentence):
        check_weight_format(Broken(), same_bits=False)


def test_the_kit_weighs() -> None:
    with pytest.raises(AssertionError, match="holds 16384 bytes, bytes_per_weight says 24576"):
        check_weight_format(Heavier(), same_bits=False)
