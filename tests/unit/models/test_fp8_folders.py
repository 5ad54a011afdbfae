"""Checkpoints of FP8 weights: converted while they are read, to the numbers of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.outline import outline_model
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes

SIZES: dict[str, Any] = sizes(96, 2, 4, 2, inner=160, vocab=64, context=64)
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 32]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"num_bits": 8, "type": "float", "strategy": strategy} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }


def in_blocks(weight: Tensor, rows: int, columns: int, powers: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A weight as FP8 numbers, the scales of its blocks (or `powers` of two), and the numbers that these are."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    scales = blocks.abs().amax((1, 3)) / 448
    if powers:
        scales = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * spread


def saved(folder: Path, settings: dict[str, Any], model: Any, dtype: str = "bfloat16") -> dict[str, Tensor]:
    """Save `model` with FP8 projections; returns the numbers of all its weights."""
    config_groups = settings.get("config_groups")
    weights = config_groups["group_0"]["weights"] if config_groups else {}
    block = settings.get("weight_block_size") or weights.get("block_structure")
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = numbers[name] = weight.bfloat16()
        if not name.endswith("_proj.weight"):
            continue
        size = block or ((1, weight.shape[1]) if weights.get("strategy") == "channel" else weight.shape)
        powers = settings.get("scale_fmt") == "ue8m0"
        stored[name], scales, numbers[name] = in_blocks(weight.float(), *size, powers)
        part = "weight_scale" if config_groups else "weight_scale_inv"
        stored[f"{name.removesuffix('weight')}{part}"] = scales if scales.numel() > 1 else scales.reshape(1)
        stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"dtype": dtype, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(changed))
    return numbers


def tiny() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


CASES = {
    "blocks": FP8,
    "powers of two": FP8 | {"scale_fmt": "ue8m0"},
    "matrix": {"quant_method": "fp8"},
    "channel": compressed("channel"),
    "tensor": compressed("tensor"),
    "block": compressed("block", block_structure=[64, 32]),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_files(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = saved(tmp_path, CASES[case], tiny())
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    for name, expected in numbers.items():
        assert torch.equal(wide[name], expected.float()), name
    assert "holds FP8 weights, which are converted to float32 while they are read" in caplog.text


@needs_kernels
def test_they_take_the_types_that_plain_weights_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = saved(tmp_path, FP8, tiny())
    lm = load_model(str(tmp_path))
    assert (lm.kernels, lm.weight_format.name) == ("decoder", "bfloat16")
    assert "converted to bfloat16" in caplog.text
    assert isinstance(lm.executor, CpuKernels)
    up = numbers["model.layers.1.mlp.down_proj.weight"].bfloat16().float()
    assert torch.equal(lm.executor.linears[-2].unpack(torch.arange(len(up))), up)
    assert load_model(str(tmp_path), quantization="int8").weight_format.name == "int8"
    planned = outline_model(str(tmp_path))
    assert planned.held.total_bytes == lm.weight_bytes
    assert planned.stored_bytes == planned.num_parameters


@needs_kernels
@pytest.mark.parametrize("asked", [{"dtype": "float32"}, {"quantization": "float32"}], ids=str)
def test_float32_rounds_nothing(asked: dict[str, str], tmp_path: Path) -> None:
    down = saved(tmp_path, FP8, tiny())["model.layers.1.mlp.down_proj.weight"].float()
    assert not torch.equal(down, down.bfloat16().float())
    lm = load_model(str(tmp_path), **asked)
    assert isinstance(lm.executor, CpuKernels)
    assert torch.equal(lm.executor.linears[-2].unpack(torch.arange(len(down))), down)


def test_experts_are_converted_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES | {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    )
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    plain.mkdir()
    numbers = saved(folder, FP8, Qwen3MoeForCausalLM(config).eval())
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (plain / "config.json").write_text(json.dumps(settings))
    ours, theirs = (load_model(str(path), dtype="float32", pack=False).model for path in (folder, plain))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, FP8, tiny())
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj"
    good = load_file(file)

    def without(part: str) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in good.items() if key != f"{name}.{part}"}

    scale = good[f"{name}.weight_scale_inv"]
    save_file(without("weight_scale_inv"), file)
    assert f"{name} holds FP8 numbers and lacks weight_scale_inv" in refusal(tmp_path)
    save_file(good | {f"{name}.weight_scale_inv": scale[:, 1:].contiguous()}, file)
    assert f"{name}.weight_scale_inv is 2 x 4, and its layer needs 2 x 5" in refusal(tmp_path)
    save_file(good | {f"{name}.weight_scale_inv": scale.int()}, file)
    assert f"{name}.weight_scale_inv holds int32 numbers" in refusal(tmp_path)
    save_file(good | {f"{name}.weight": good[f"{name}.weight"][:64].contiguous()}, file)
    assert "its layer needs 1 x 5" in refusal(tmp_path)
    save_file(good | {f"{name}.weight_scale_inv": scale[0, 0].clone()}, file)
    assert f"{name}.weight_scale_inv is one number, and its layer needs 2 x 5" in refusal(tmp_path)
    save_file(good | {f"{name}.weight": good[f"{name}.weight"][:, :0].contiguous()}, file)
    assert f"{name}.weight is 96 x 0: it holds nothing" in refusal(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(good | {f"{name}.weight_scale_inv": scale[:0].contiguous()}, file)
    assert f"{name}.weight_scale_inv is empty" in refusal(tmp_path)
    config["quantization_config"]["weight_block_size"] = [64]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "FP8 weights in blocks of [64]: a block has two sizes" in refusal(tmp_path)
    config["quantization_config"] = compressed("group")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "float of 8 bits, a scale a group" in refusal(tmp_path)
