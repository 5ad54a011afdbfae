"""Quantised files with experts: rounded or widened where an option says so, and the numbers are the file's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slipstream.errors import ModelError, UnsupportedModelError
from slipstream.models import load_model
from slipstream.models.cpu.native import unavailable
from slipstream.models.files.stored_experts import StoredStack
from slipstream.models.outline import outline_model
from slipstream.models.unloaded import shared_outlines
from tests.kit.gguf_files import write_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import Layer, awq, compressed, gptq, quantise_folder
from tests.kit.small_llama import sizes
from tests.unit.models.test_gguf_models import ARCHS, FAMILIES, WITH_EXPERTS, tiny

IDS = [number * 3 % 96 for number in range(20)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
SHAPE = sizes(64, 2, 4, 2, vocab=96, context=64, num_experts_per_tok=2)
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=16, moe_intermediate_size=96, num_experts=5, norm_topk_prob=True)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, intermediate_size=96, num_local_experts=3)),
}
GROUP = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
METHODS: dict[str, tuple[Callable[[Layer], dict[str, Tensor]], dict[str, Any]]] = {
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "act-order": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
}
EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def saved(folder: Path, family: str, method: str, parts: tuple[str, ...] = (*EXPERTS, *ATTENTION)) -> Any:
    """A tiny model in `folder` whose layers of these names are quantised, and the model with the same numbers."""
    torch.manual_seed(0)
    model = MODELS[family]()
    model.save_pretrained(folder, state_dict={k: v.half() for k, v in model.state_dict().items()})
    write, settings = METHODS[method]
    file = folder / "model.safetensors"
    state = {name: weight.half() for name, weight in load_file(file).items()}
    save_file(state, file)
    layers, numbers = {}, {name: weight.float() for name, weight in state.items()}
    for name, weight in state.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] not in parts:
            continue
        order = method == "act-order"
        layer = Layer.random(*weight.shape, 32, 4, seed=crc32(stem.encode()), act_order=order)
        if order:  # layers that read the same rows are in the same order
            seed = torch.Generator().manual_seed(weight.shape[1])
            layer.group_of = (torch.arange(weight.shape[1]) // 32)[
                torch.randperm(weight.shape[1], generator=seed)
            ]
        layers[stem] = write(layer)
        numbers[name] = layer.weight
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    quantise_folder(folder, layers, settings)
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises((ModelError, UnsupportedModelError)) as caught:
        load_model(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def expert_weights(lm: Any) -> Tensor:
    """Return the weights of all layers and experts, as the kernels multiply with them."""
    linears = [weight for experts in lm.executor.experts for weight in experts.linears]
    return torch.cat([weight.unpack(torch.arange(weight.out_features)).flatten() for weight in linears])


@needs_kernels
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", MODELS)
def test_experts_stay_packed(family: str, method: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "x", family, method)
    lm = load_model(str(tmp_path / "x"))
    assert lm.kernels == "decoder"
    assert lm.stored_bits == {4}
    assert lm.weight_type.endswith("4 bits")
    assert relative_error(packed_logits(lm), logits(model)) < 0.03
    wide = load_model(str(tmp_path / "x-plain"), dtype="float32")
    assert torch.equal(expert_weights(lm), expert_weights(wide)), "the numbers are the file's"
    planned = outline_model(str(tmp_path / "x"))
    assert planned.held.total_bytes == lm.weight_bytes
    assert planned.num_parameters == lm.num_parameters == wide.num_parameters
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)


@needs_kernels
def test_experts_that_differ_in_what_the_kernels_share_are_not_kept(tmp_path: Path) -> None:
    saved(tmp_path / "x", "mixtral", "act-order")
    file = tmp_path / "x/model.safetensors"
    state = load_file(file)
    own = next(name for name in state if name.endswith("experts.1.w2.g_idx"))
    save_file(state | {own: state[own].flip(0)}, file)
    what = refusal(tmp_path / "x")
    assert (
        "cannot be kept packed (model.layers.0.mlp.experts.down_proj: layers that are computed as one" in what
    )
    assert "their inputs in different orders); --quantization int8 or int4 rounds them" in what
    assert load_model(str(tmp_path / "x"), quantization="int8").weight_type.endswith("experts in int8")
    saved(tmp_path / "y", "qwen3_moe", "awq", ("up_proj", "down_proj"))
    assert "gate_up_proj: some of them are not quantised); --quantization" in refusal(tmp_path / "y")


def test_what_cannot_hold_experts_says_what_can(tmp_path: Path) -> None:
    saved(tmp_path / "x", "qwen3_moe", "awq")
    what = refusal(tmp_path / "x", cpu_kernels="torch")
    assert (
        "the experts of this qwen3_moe model are AWQ, 4 bits weights (model.layers.0.mlp.experts.0." in what
    )
    assert "which only our own kernels on a CPU hold as they are, or rounded (--quantization int8" in what
    assert "--dtype bfloat16 or float16 widens the whole model" in what


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", MODELS)
def test_a_dtype_widens_the_files_numbers(family: str, method: str, tmp_path: Path) -> None:
    expected = logits(saved(tmp_path / "x", family, method))
    wide = load_model(str(tmp_path / "x"), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-5, atol=1e-5)


ROUNDED = {"int8": 0.06, "int4": 0.3, "bfloat16": 0.12}
"""Errors of logits over their spread: attention's rows are rounded to 8 bits in all of them, and now and then a random
router chooses another expert. Measured: up to 0.025, 0.11, 0.06."""


@needs_kernels
@pytest.mark.parametrize(
    ("name", "family", "method"),
    [
        (list(ROUNDED)[(number + shift) % len(ROUNDED)], family, method)
        for shift, family in enumerate(MODELS)
        for number, method in enumerate(METHODS)
    ],
)
def test_experts_are_rounded_to_the_format_that_is_named(
    name: str, family: str, method: str, tmp_path: Path
) -> None:
    model = saved(tmp_path / "x", family, method)
    lm = load_model(str(tmp_path / "x"), quantization=name)
    assert lm.kernels == "decoder"
    assert lm.stored_bits == {4}, "attention stays packed"
    assert lm.weight_type.endswith(f"4 bits, experts in {name}")
    assert lm.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert relative_error(packed_logits(lm), logits(model)) < ROUNDED[name]
    plain = load_model(str(tmp_path / "x-plain"), quantization=name)
    assert torch.equal(expert_weights(lm), expert_weights(plain)), "as if saved in 32 bits"
    planned = outline_model(str(tmp_path / "x"), quantization=name)
    assert planned.held.total_bytes == lm.weight_bytes
    assert planned.num_parameters == lm.num_parameters
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)


@needs_kernels
@pytest.mark.parametrize("family", MODELS)
def test_no_more_than_one_expert_is_held_widened(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, held, most = StoredStack.read, WeakSet[Any](), 0

    def counted(stack: StoredStack, expert: int) -> Tensor:
        nonlocal most
        weight = read(stack, expert)
        held.add(weight.untyped_storage())
        most = max(most, len(held))
        return weight

    monkeypatch.setattr(StoredStack, "read", counted)
    saved(tmp_path / "x", family, "gptq")
    load_model(str(tmp_path / "x"), quantization="int8")
    assert 1 <= most <= 3, "the last one of each stack and the next"


@needs_kernels
def test_experts_may_be_all_that_is_quantised(tmp_path: Path) -> None:
    model = saved(tmp_path / "x", "mixtral", "gptq", EXPERTS)
    lm = load_model(str(tmp_path / "x"), quantization="int8")
    planned = outline_model(str(tmp_path / "x"), quantization="int8")
    assert lm.weight_type == planned.weight_type == "int8"
    assert planned.held.total_bytes == lm.weight_bytes
    assert relative_error(packed_logits(lm), logits(model)) < ROUNDED["int8"]


@needs_kernels
def test_parts_of_experts_in_16_bits_are_rounded_beside_the_others(tmp_path: Path) -> None:
    saved(tmp_path / "x", "qwen3_moe", "awq", ("up_proj", "down_proj", *ATTENTION))
    ours, plain = (load_model(str(tmp_path / name), quantization="int8") for name in ("x", "x-plain"))
    assert torch.equal(expert_weights(ours), expert_weights(plain))


@needs_kernels
def test_plans_with_and_without_an_option_are_not_mixed_up(tmp_path: Path) -> None:
    saved(tmp_path / "x", "mixtral", "awq")
    with shared_outlines():
        found = [outline_model(str(tmp_path / "x"), quantization=name) for name in ("int8", "int4", "int8")]
        assert [each.weight_type.rpartition(" ")[2] for each in found] == ["int8", "int4", "int8"]
        assert found[0].held.total_bytes > found[1].held.total_bytes
        assert outline_model(str(tmp_path / "x")).weight_type == "AWQ, 4 bits"


def test_what_the_kernels_do_not_compute_is_not_rounded(tmp_path: Path) -> None:
    saved(tmp_path / "x", "qwen3_moe", "gptq")
    what = refusal(tmp_path / "x", quantization="int8", cpu_kernels="torch")
    assert "which only our own kernels on a CPU hold" in what
    config = tmp_path / "x/config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "relu"'))
    if unavailable() is None:
        what = refusal(tmp_path / "x", quantization="int8")
        assert "held for the fused decoder alone, which does not run this model; --dtype bfloat16" in what


@needs_kernels
def test_files_whose_experts_are_not_the_models_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "x", "qwen3_moe", "gptq")
    file, config = tmp_path / "x/model.safetensors", tmp_path / "x/config.json"
    whole, said = load_file(file), config.read_text()

    def of(change: str = "", **tensors: Any) -> str:
        config.write_text(said.replace(*change.split("->")) if change else said)
        return refusal(tmp_path / "x", quantization="int8")

    first = "model.layers.1.mlp.experts.3.up_proj"
    save_file({name: part for name, part in whole.items() if not name.startswith(first)}, file)
    assert "model.layers.1.mlp.experts lacks a part of gate_up_proj of expert 3" in of()
    save_file(whole, file)
    assert "is one expert more than the configuration's 4" in of(
        '"num_local_experts": 5->"num_local_experts": 4'
    )
    assert "lacks a part of gate_up_proj of expert 5" in of('"num_local_experts": 5->"num_local_experts": 6')
    wide = of('"moe_intermediate_size": 96->"moe_intermediate_size": 64')
    assert "gate_proj is 96 x 64, and the configuration says 64 x 64" in wide
    dense = of('"mlp_only_layers": []->"mlp_only_layers": [0]')
    assert "the fused decoder does not know the experts of this qwen3_moe model" in dense


def test_an_adapter_of_experts_that_are_rounded_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = saved(tmp_path / "x", "mixtral", "gptq")
    for name, targets in (
        ("experts", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("attention", {"target_modules": ["q_proj"]}),
    ):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "x-plain", dtype=torch.float32)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **targets)
        peft.get_peft_model(plain, config).save_pretrained(tmp_path / name)
    if unavailable() is not None:
        return
    options = {"quantization": "int8", "lora": str(tmp_path / "experts")}
    assert "the adapter cannot be kept apart from quantised weights" in refusal(tmp_path / "x", **options)
    with pytest.raises(ModelError, match="the adapter cannot be kept apart from quantised weights"):
        outline_model(str(tmp_path / "x"), **options)
    outline_model(str(tmp_path / "x"), quantization="int8", lora=str(tmp_path / "attention"))
    lm = load_model(str(tmp_path / "x"), quantization="int8", lora=str(tmp_path / "attention"))
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "attention")).merge_and_unload()
    assert relative_error(packed_logits(lm), logits(adapted)) < ROUNDED["int8"]


# --- GGUF -------------------------------------------------------------------------------------------------

KINDS = {"": "Q4_0", "blk.1.ffn_down_exps.weight": "Q8_0", "blk.2.ffn_up_exps.weight": "Q5_0"}
"""Types differ within a layer's experts, as in llama.cpp's mixtures."""


def gguf_file(tmp_path: Path, arch: str, more: dict[str, Any] | None = None) -> tuple[Path, Any]:
    """A tiny model with experts in random blocks, and the Transformers model with the same numbers."""
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    model_type, changes, keys = FAMILIES[arch]
    model = tiny(model_type, changes)
    with torch.no_grad():
        file = write_model(tmp_path / "x.gguf", ARCHS.get(arch, arch), model, keys | (more or {}), KINDS)
    return file, model


@pytest.mark.parametrize("arch", WITH_EXPERTS)
def test_experts_of_a_gguf_file_stay_packed_or_are_widened_or_rounded_by_option(
    arch: str, tmp_path: Path
) -> None:
    file, model = gguf_file(tmp_path, arch)
    expected = logits(model)
    wide = load_model(str(file), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-4, atol=1e-4)
    if unavailable() is not None:
        return
    lm = load_model(str(file))
    assert (lm.weight_type, lm.stored_bits) == ("Q4_0, Q8_0, Q5_0", {4, 8})
    assert relative_error(packed_logits(lm), expected) < 0.03
    assert outline_model(str(file)).held.total_bytes == lm.weight_bytes
    for name, bound in (("int8", 0.06), ("int4", 0.3)):
        lm = load_model(str(file), quantization=name)
        assert lm.weight_type.endswith(f"experts in {name}")
        assert relative_error(packed_logits(lm), expected) < bound
        assert outline_model(str(file), quantization=name).held.total_bytes == lm.weight_bytes
        plain = write_model(tmp_path / "plain.gguf", ARCHS.get(arch, arch), model, FAMILIES[arch][2])
        assert torch.equal(expert_weights(lm), expert_weights(load_model(str(plain), quantization=name)))


def test_gguf_files_whose_experts_disagree_with_their_keys_are_refused(tmp_path: Path) -> None:
    for more, what in (
        ({"expert_count": 4}, "blk.0.ffn_gate_exps.weight is 3 x 96 x 64, and the keys say 4 x 96 x 64"),
        ({"expert_used_count": 0}, "llama.expert_used_count is 0"),
        ({"expert_feed_forward_length": 32}, "3 x 96 x 64, and the keys say 3 x 32 x 64"),
    ):
        assert what in refusal(gguf_file(tmp_path, "mixtral", more)[0])
    model_type, changes, keys = FAMILIES["qwen2"]
    file = write_model(tmp_path / "x.gguf", "qwen2", tiny(model_type, changes), keys | {"expert_count": 2})
    assert "holds a qwen2 model with experts, which is read without them only" in refusal(file)
