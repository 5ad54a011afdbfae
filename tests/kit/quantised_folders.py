"""Small checkpoints in the layouts of GPTQ, AWQ, compressed-tensors and MLX, packed number by number."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each place of a word holds."""


@dataclass
class Layer:
    """A random quantised layer: a weight is `scale * (code - zero)` of its group."""

    codes: Tensor
    """int64 [out, in]"""
    zeros: Tensor
    """int64 [out, groups]"""
    scales: Tensor
    """float16 [out, groups]"""
    group_of: Tensor
    """int64 [in]: the group of each input."""
    bits: int
    minimums: Tensor | None = None
    """[out, groups]: what a code of 0 is, where a layout has no zeros."""

    @classmethod
    def random(
        cls,
        outputs: int,
        inputs: int,
        group: int,
        bits: int,
        seed: int,
        act_order: bool = False,
        middle: bool = False,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        groups = inputs // group
        zeros = torch.randint(1, 2**bits, (outputs, groups), generator=generator)
        group_of = torch.arange(inputs) // group
        if act_order:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
        return cls(
            torch.randint(0, 2**bits, (outputs, inputs), generator=generator),
            torch.full_like(zeros, 2 ** (bits - 1)) if middle else zeros,
            ((torch.rand(outputs, groups, generator=generator) + 0.5) * 0.3 / 2**bits).half(),
            group_of,
            bits,
        )

    @classmethod
    def rounded(cls, weight: Tensor, group: int, bits: int, act_order: bool = False) -> Layer:
        """A weight rounded to the nearest code, in the middle of which is nothing."""
        inputs, half = weight.shape[1], 2 ** (bits - 1)
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        parts = weight[:, order].view(len(weight), -1, group)
        scales = (parts.abs().amax(-1) / (half - 1)).half()
        codes = (parts / scales[..., None].float()).round().clamp(-half, half - 1) + half
        found, group_of = torch.empty(weight.shape, dtype=torch.int64), torch.empty(inputs, dtype=torch.int64)
        found[:, order], group_of[order] = codes.flatten(1).long(), torch.arange(inputs) // group
        return cls(found, torch.full(scales.shape, half), scales, group_of, bits)

    @property
    def weight(self) -> Tensor:
        """float32 [out, in]"""
        scales, zeros = self.scales.float()[:, self.group_of], self.zeros[:, self.group_of]
        if self.minimums is not None:
            return scales * self.codes + self.minimums.float()[:, self.group_of]
        return scales * (self.codes - zeros)


def words(numbers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int64 [..., n] -> int32 [..., n * bits / 32]: number `places[i]` of every word at its place i.

    Numbers that do not fill words run on from one to the next.
    """
    if 32 % bits:
        shifts = torch.arange(bits)
        stream = (numbers[..., None] >> shifts & 1).flatten(-2)
        return (stream.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1).to(torch.int32)
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % each))
    packed = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // each, dtype=torch.int64)
    for place, which in enumerate(places or range(each)):
        packed |= numbers[..., which::each] << (bits * place)
    return packed.to(torch.int32)


def gptq(layer: Layer, less_one: bool = True) -> dict[str, Tensor]:
    """As AutoGPTQ saves a layer."""
    stored = layer.zeros - 1 if less_one else layer.zeros
    return {
        "qweight": words(layer.codes, layer.bits).T.contiguous(),
        "qzeros": words(stored.T, layer.bits),
        "scales": layer.scales.T.contiguous(),
        "g_idx": layer.group_of.to(torch.int32),
    }


def awq(layer: Layer) -> dict[str, Tensor]:
    """As AutoAWQ saves a layer for its GEMM kernel."""
    return {
        "qweight": words(layer.codes.T, 4, AWQ_ORDER),
        "qzeros": words(layer.zeros.T, 4, AWQ_ORDER),
        "scales": layer.scales.T.contiguous(),
    }


def compressed(layer: Layer, packed: bool = True, symmetric: bool = False) -> dict[str, Tensor]:
    """As compressed-tensors saves a layer."""
    tensors = {"weight_scale": layer.scales.bfloat16()}
    layer.scales = layer.scales.bfloat16()
    half = 2 ** (layer.bits - 1)
    if packed:
        tensors["weight_packed"] = words(layer.codes, layer.bits)
        tensors["weight_shape"] = torch.tensor(layer.codes.shape)
        if not symmetric:
            tensors["weight_zero_point"] = words(layer.zeros.T, layer.bits).T.contiguous()
    else:
        tensors["weight"] = (layer.codes - half).to(torch.int8)
    if not bool((layer.group_of.diff() >= 0).all()):
        tensors["weight_g_idx"] = layer.group_of.to(torch.int32)
    return tensors


def mlx(layer: Layer) -> dict[str, Tensor]:
    """As MLX saves a layer."""
    layer.scales = layer.scales.bfloat16()
    layer.minimums = (-layer.zeros * layer.scales).bfloat16()
    return {
        "weight": words(layer.codes, layer.bits).view(torch.uint32),
        "scales": layer.scales,
        "biases": layer.minimums,
    }


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def gptq_folder(folder: Path, source: str, group: int, act_order: bool = False) -> Path:
    """A checkpoint whose layers are rounded to 4 bits, as GPTQ saves them."""
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".weight") for name in state if name.split(".")[-2] in LINEARS]
    layers = {
        name: gptq(Layer.rounded(state[f"{name}.weight"].float(), group, 4, act_order)) for name in names
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order}
    quantise_folder(folder, layers, settings)
    return folder


def quantise_folder(folder: Path, layers: dict[str, dict[str, Tensor]], settings: dict[str, Any]) -> None:
    """Replace the weights of a saved model's layers by these tensors."""
    state = load_file(folder / "model.safetensors")
    for name, tensors in layers.items():
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": "float16", "quantization_config": settings})
    )
