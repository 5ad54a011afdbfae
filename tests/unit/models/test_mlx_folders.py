"""MLX's folders: embeddings and experts too have the file's numbers, in each layer's own bits."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.files.mlx import MlxMatrix, MlxSettings
from slipstream.models.files.quantised_folder import check_settings
from slipstream.models.outline import outline_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import Layer, mlx
from tests.kit.small_llama import sizes

IDS = [number * 3 % 96 for number in range(20)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
SHAPE: dict[str, Any] = sizes(64, 2, 4, 2, inner=128, vocab=96, context=64)
EXPERTS: dict[str, Any] = SHAPE | {"num_experts_per_tok": 2}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=3)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**EXPERTS, head_dim=16, moe_intermediate_size=96, num_experts=5)
    ),
}
DELTA: dict[str, Any] = {
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
RECURRENT: dict[str, Any] = {
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE | DELTA)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **EXPERTS | DELTA,
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
}
"""Families whose convolutions, and norms in part, MLX saves otherwise."""
SHIFTED = (
    *("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"),
    *("q_norm.weight", "k_norm.weight"),
)
QUANTIZATION: dict[str, Any] = {"group_size": 32, "bits": 4}
OTHERS = {
    "model.embed_tokens": {"group_size": 64, "bits": 8},
    "model.layers.0.mlp.gate": False,
    "model.layers.0.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 8},
    "model.layers.1.block_sparse_moe.switch_mlp.up_proj": {"group_size": 64, "bits": 6},
}
OLD_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def saved(folder: Path, family: str, quantization: dict[str, Any]) -> Any:
    """A tiny model in `folder` as MLX saves it, every matrix quantised; returns the model with the same numbers."""
    torch.manual_seed(0)
    model = (MODELS | RECURRENT)[family]()
    plain = folder.with_name(f"{folder.name}-plain")
    for path in (folder, plain):
        model.save_pretrained(path)
    numbers, stored = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        sizes_ = quantization.get(of_stack(stem), quantization)
        if weight.ndim != 2 or sizes_ is False:
            numbers[name] = stored[name] = weight.bfloat16()
            if family in RECURRENT and weight.ndim == 3:
                stored[name] = numbers[name].movedim(1, 2).contiguous()
            if family in ("qwen3_5", "qwen3_next") and name.endswith(SHIFTED):
                stored[name] = numbers[name] + 1
                numbers[name] = stored[name].float() - 1
            continue
        layer = Layer.random(*weight.shape, sizes_["group_size"], sizes_["bits"], seed=crc32(name.encode()))
        stored |= {f"{stem}.{part}": tensor for part, tensor in mlx(layer).items()}
        numbers[name] = layer.weight
    save_file(stacked(stored), folder / "model.safetensors", metadata={"format": "mlx"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def of_stack(name: str) -> str:
    """What MLX calls the stack that holds an expert's layer; the own name of any other layer."""
    block, _, rest = name.partition(".experts.")
    if not rest:
        return name
    _, layer, *part = rest.split(".")
    return ".".join([f"{block}.switch_mlp", OLD_NAMES.get(layer, layer), *part])


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of each layer in one tensor, as MLX names it."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if of_stack(name) == name:
            found[name] = tensor
        else:
            found.setdefault(of_stack(name), []).append(tensor)
    return {name: torch.stack(each) if isinstance(each, list) else each for name, each in found.items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_layer_has_the_files_numbers(bits: int) -> None:
    layer = Layer.random(24, 192, 64, bits, seed=bits)
    tensors = mlx(layer)
    matrix = MlxMatrix("w", tensors, MlxSettings.read({"group_size": 64, "bits": bits}))
    assert torch.equal(torch.cat([matrix.widened(0, 11), matrix.widened(11, 24)]), layer.weight)


@pytest.mark.parametrize("others", [{}, OTHERS], ids=["alike", "others"])
@pytest.mark.parametrize("family", MODELS)
def test_a_folder_has_the_logits_of_its_numbers(family: str, others: dict[str, Any], tmp_path: Path) -> None:
    expected = logits(saved(tmp_path / "x", family, QUANTIZATION | others))
    wide = load_model(str(tmp_path / "x"), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", RECURRENT)
def test_convolutions_and_norms_are_as_transformers_has_them(family: str, tmp_path: Path) -> None:
    expected = logits(saved(tmp_path / "x", family, QUANTIZATION))
    wide = load_model(str(tmp_path / "x"), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_folder_stays_packed(family: str, tmp_path: Path) -> None:
    expected = logits(saved(tmp_path / "x", family, QUANTIZATION | OTHERS))
    lm = load_model(str(tmp_path / "x"))
    assert (lm.kernels, lm.stored_bits) == ("decoder", {4, 8})
    assert lm.weight_type.endswith("MLX, 4/8 bits")
    assert relative_error(packed_logits(lm), expected) < 0.03
    planned = outline_model(str(tmp_path / "x"))
    assert planned.held.total_bytes == lm.weight_bytes
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)
    assert planned.num_parameters == lm.num_parameters


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_stay_packed_or_are_rounded(family: str, quantization: str | None, tmp_path: Path) -> None:
    """What chooses among them is quantised in the file, and widened."""
    model = saved(tmp_path / "x", family, QUANTIZATION)
    lm = load_model(str(tmp_path / "x"), quantization=quantization)
    assert lm.kernels == "decoder"
    assert relative_error(packed_logits(lm), logits(model)) < 0.06
    planned = outline_model(str(tmp_path / "x"), quantization=quantization)
    assert planned.held.total_bytes == lm.weight_bytes


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "x", "llama", QUANTIZATION)
    folder, name = tmp_path / "x", "model.layers.0.mlp.up_proj"
    good = load_file(folder / "model.safetensors")

    def of(part: str, tensor: Tensor | None) -> str:
        held = good | ({} if tensor is None else {f"{name}.{part}": tensor})
        if tensor is None:
            del held[f"{name}.{part}"]
        save_file(held, folder / "model.safetensors")
        return refusal(folder)

    assert f"{name} lacks biases" in of("biases", None)
    scales, words = good[f"{name}.scales"], good[f"{name}.weight"]
    assert f"{name}.weight is 128 x 8, and its layer needs 128 x 4" in of(
        "scales", scales[:, :1].contiguous()
    )
    assert f"{name}.weight holds int32 numbers" in of("weight", words.view(torch.int32))
    for mode, what in (("mxfp4", "(mode mxfp4)"), ("affine", "MLX weights of 7 bits in groups of 32")):
        with pytest.raises(ModelError) as caught:
            check_settings("mlx", {"group_size": 32, "bits": 7 if mode == "affine" else 4, "mode": mode})
        assert what in str(caught.value)
