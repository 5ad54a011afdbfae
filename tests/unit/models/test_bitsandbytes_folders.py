"""bitsandbytes' folders: 4 bits are looked up in the file's own tables, and 8 bits stay."""

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
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.outline import outline_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import LINEARS, quantise_folder
from tests.kit.small_llama import sizes

IDS = [number * 3 % 96 for number in range(20)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
SIZES: dict[str, Any] = sizes(72, 2, 4, 2, inner=136, vocab=96, context=64)
"""Blocks of 64 run on from one row to the next, and the last one of a matrix is cut short."""
BLOCK, NESTED = 64, 16
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def packed(shape: tuple[int, int], seed: int, kind: str, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """A random layer of 4 bits as bitsandbytes saves it, number by number, and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    count = shape[0] * shape[1]
    codes = torch.randint(0, 16, (count,), generator=generator)
    table = torch.rand(16, generator=generator).sort()[0] * 2 - 1
    scales = torch.rand(-(-count // BLOCK), generator=generator) * 0.1 + 0.05
    says: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": shape}
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    if nested:
        places = torch.randint(0, 256, scales.shape, generator=generator)
        outer, offset = torch.rand(-(-len(scales) // NESTED), generator=generator) * 0.05, 0.0625
        inner = torch.rand(256, generator=generator) * 2 - 1
        scales = inner[places] * outer[torch.arange(len(scales)) // NESTED] + offset
        says |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
        tensors["weight.absmax"] = places.to(torch.uint8)
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(says).encode())).to(
        torch.uint8
    )
    tensors["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    return tensors, (table[codes] * scales[torch.arange(count) // BLOCK]).view(shape)


def of_bytes(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A random layer of 8 bits as bitsandbytes saves it, and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, shape, generator=generator)
    largest = torch.rand(shape[0], generator=generator) * 0.2 + 0.1
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0).to(torch.uint8),
    }
    return tensors, codes * (largest / 127)[:, None]


def saved(folder: Path, settings: dict[str, Any], make: Any) -> Any:
    """A tiny model in `folder`, quantised, with a bias in each MLP; the Transformers model with the same numbers."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder, state_dict={k: v.half() for k, v in model.state_dict().items()})
    layers = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in LINEARS:
            layers[name], module.weight.data = make(tuple(module.weight.shape), crc32(name.encode()))
    quantise_folder(folder, layers, settings)
    return model.eval()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_numbers_are_the_files(
    kind: str, nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = saved(tmp_path, FOUR, partial(packed, kind=kind, nested=nested)).state_dict()
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(wide[name], weight), name
    assert f"holds bitsandbytes {kind.upper()} weights, which are converted to float32" in caplog.text


@needs_kernels
def test_they_take_the_types_that_plain_weights_take(tmp_path: Path) -> None:
    down = (
        saved(tmp_path, FOUR, partial(packed, kind="nf4", nested=True)).model.layers[-1].mlp.down_proj.weight
    )
    for asked, rounded in (({}, down.half().float()), ({"dtype": "float32"}, down)):
        lm = load_model(str(tmp_path), **asked)
        assert isinstance(lm.executor, CpuKernels)
        assert torch.equal(lm.executor.linears[-2].unpack(torch.arange(len(down))), rounded)
        planned = outline_model(str(tmp_path), **asked)
        assert planned.held.total_bytes == lm.weight_bytes
        assert planned.stored_bytes == planned.num_parameters // 2
    assert load_model(str(tmp_path), quantization="int4").weight_format.name == "int4"


@needs_kernels
def test_8_bits_stay_packed(tmp_path: Path) -> None:
    model = saved(tmp_path, EIGHT, of_bytes)
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model
    torch.testing.assert_close(logits(wide), logits(model), rtol=1e-6, atol=1e-6)
    lm = load_model(str(tmp_path))
    assert (lm.kernels, lm.stored_bits) == ("decoder", {8})
    assert lm.weight_type.endswith("bitsandbytes, 8 bits")
    assert relative_error(packed_logits(lm), logits(model)) < 0.03
    assert outline_model(str(tmp_path)).held.total_bytes == lm.weight_bytes


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    four, eight, name = tmp_path / "four", tmp_path / "eight", "model.layers.0.mlp.down_proj"
    saved(four, FOUR, partial(packed, kind="nf4", nested=True))
    saved(eight, EIGHT, of_bytes)
    good = {folder: load_file(folder / "model.safetensors") for folder in (four, eight)}
    state = "weight.quant_state.bitsandbytes__nf4"

    def of(folder: Path, part: str, tensor: Tensor | None) -> str:
        held = good[folder] | ({} if tensor is None else {f"{name}.{part}": tensor})
        if tensor is None:
            del held[f"{name}.{part}"]
        save_file(held, folder / "model.safetensors")
        return refusal(folder)

    assert f"{name} lacks weight.quant_map" in of(four, "weight.quant_map", None)
    assert f"{name} lacks {state}" in of(four, state, None)
    assert f"{name} lacks weight.nested_absmax" in of(four, "weight.nested_absmax", None)
    assert "quant_state is damaged" in of(four, state, torch.zeros(4, dtype=torch.uint8))
    assert "quant_state is damaged" in of(four, state, torch.tensor(list(b"[]")).to(torch.uint8))
    odd = json.dumps({"quant_type": "nf4", "shape": [1], "blocksize": 64}).encode()
    assert "says a shape of [1] and blocks of 64" in of(four, state, torch.tensor(list(odd)).to(torch.uint8))
    short = good[four][f"{name}.weight"][2:].contiguous()
    assert f"{name}.weight is 4894, and its layer needs 4896" in of(four, "weight", short)
    assert f"{name}.SCB is 71, and its layer needs 72" in of(eight, "SCB", torch.ones(71))
    assert "order of a GPU's (weight_format)" in of(eight, "weight_format", torch.ones(1, dtype=torch.uint8))
    config = json.loads((four / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (four / "config.json").write_text(json.dumps(config))
    assert "bitsandbytes weights without load_in_4bit or load_in_8bit" in refusal(four)
