"""NVFP4 and MXFP4 of compressed-tensors, NVFP4 and FP8 of ModelOpt: the numbers are the file's, and stay packed."""

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
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.outline import outline_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import LINEARS, quantise_folder
from tests.kit.small_llama import sizes

IDS = [number * 3 % 96 for number in range(20)]
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUPS = {"nvfp4": 16, "mxfp4": 32, "modelopt": 16}


def settings(kind: str, **weights: Any) -> dict[str, Any]:
    if kind == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    group = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": GROUPS[kind]}
    group["strategy"] = "tensor_group" if kind == "nvfp4" else "group"
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group | weights}},
        "ignore": ["lm_head"],
    }


def packed(shape: tuple[int, int], seed: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """A random layer as compressed-tensors saves it, number by number, and its numbers by definition."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator)
    groups = (shape[0], shape[1] // GROUPS[kind])
    own = kind == "modelopt"
    tensors = {"weight" if own else "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if own:
        tensors["weight_scale"] = (torch.rand(groups, generator=generator) * 400 + 20).to(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = torch.rand((), generator=generator) / 9000
        tensors["input_scale"] = torch.ones(())
        scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    elif kind == "nvfp4":
        tensors["weight_scale"] = (torch.rand(groups, generator=generator) * 400 + 20).to(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.rand(1, generator=generator) * 3000 + 9000
        tensors["input_global_scale"] = torch.ones(1)
        scales = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    else:
        exponents = torch.randint(120, 124, groups, generator=generator)
        tensors["weight_scale"], scales = exponents.to(torch.uint8), 2.0 ** (exponents - 127)
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    return tensors, table[codes] * scales.repeat_interleave(GROUPS[kind], 1)


def saved(folder: Path, kind: str, make: Any = packed, **more: Any) -> Any:
    """A tiny model in `folder`, quantised; the Transformers model with the same numbers."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes(64, 2, 4, 2, inner=96, vocab=96, context=64)))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder, state_dict={k: v.half() for k, v in model.state_dict().items()})
    layers = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in LINEARS:
            shape = tuple(module.weight.shape)
            layers[name], module.weight.data = make(shape, crc32(name.encode()), kind)
    quantise_folder(folder, layers, settings(kind) | more)
    return model.eval()


@pytest.mark.parametrize("kind", GROUPS)
def test_numbers_are_the_files(kind: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, kind).state_dict()
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(wide[name], weight), name


@needs_kernels
@pytest.mark.parametrize("kind", GROUPS)
def test_a_folder_stays_packed(kind: str, tmp_path: Path) -> None:
    expected = eager_logits(saved(tmp_path, kind), IDS)
    exact = load_model(str(tmp_path), cpu_kernels="torch")
    torch.testing.assert_close(eager_logits(exact.model, IDS), expected, rtol=1e-5, atol=1e-5)
    lm = load_model(str(tmp_path))
    assert lm.kernels == "decoder"
    assert relative_error(cached_logits(lm, IDS), expected) < 0.03
    planned = outline_model(str(tmp_path))
    assert planned.held.total_bytes == lm.weight_bytes
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    expected = saved(tmp_path, "modelopt").state_dict()
    config, own = tmp_path / "config.json", tmp_path / "hf_quant_config.json"
    plain = json.loads(config.read_text())
    del plain["quantization_config"]
    config.write_text(json.dumps(plain))
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    assert all(torch.equal(wide[name], weight) for name, weight in expected.items())
    for said, what in (
        ({"quant_algo": "W4A8_AWQ"}, "of the kind W4A8_AWQ: read are NVFP4 and FP8"),
        (5, "hf_quant"),
    ):
        own.write_text(json.dumps({"quantization": said}))
        with pytest.raises(ModelError, match=what):
            load_model(str(tmp_path))


def test_modelopt_has_fp8_too(tmp_path: Path) -> None:
    def of_fp8(shape: tuple[int, int], seed: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
        scale = torch.tensor(0.01 + seed % 7 / 1000)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale

    expected = saved(tmp_path, "modelopt", of_fp8, quant_algo="FP8").state_dict()
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    assert all(torch.equal(wide[name], weight) for name, weight in expected.items())


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    for kind in GROUPS:
        saved(tmp_path / kind, kind)
    good = {kind: load_file(tmp_path / kind / "model.safetensors") for kind in GROUPS}

    def of(kind: str, part: str, tensor: Tensor | None) -> str:
        held = good[kind] | ({} if tensor is None else {f"{name}.{part}": tensor})
        if tensor is None:
            del held[f"{name}.{part}"]
        save_file(held, tmp_path / kind / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            load_model(str(tmp_path / kind))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"{name} lacks weight_global_scale" in of("nvfp4", "weight_global_scale", None)
    scales = {kind: good[kind][f"{name}.weight_scale"] for kind in GROUPS}
    assert f"{name}.weight_scale holds float32 numbers" in of(
        "nvfp4", "weight_scale", scales["nvfp4"].float()
    )
    short = partial(of, "mxfp4", "weight_scale")
    assert "is 64 x 2, and its layer needs 64 x 3" in short(scales["mxfp4"][:, 1:].contiguous())
    odd = good["mxfp4"][f"{name}.weight_packed"][:, 4:].contiguous()
    assert "groups of 32 do not divide its 88 inputs" in of("mxfp4", "weight_packed", odd)
