"""MLX's layout of affine quantisation: integers along the inputs, and for each group of them a scale and a bias.

Embeddings are quantised too. The experts of a layer lie in one tensor, and have here the names that they have in a
checkpoint of Transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.files.grouped import (
    Grouped,
    GroupedMatrix,
    check_matrix,
    check_shape,
    forget_at_the_end,
    unpacked,
)

PARTS = ("weight", "scales", "biases")
"""Names of a layer's tensors."""

_BITS = (2, 3, 4, 5, 6, 8)
_STACKS = (".switch_mlp.", ".switch_glu.")
_NORMS_ADD_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_WITH_CONVOLUTIONS = (*_NORMS_ADD_ONE, "lfm2")
_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
_OLD_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""What Mixtral calls the layers of an expert."""


@dataclass(frozen=True, slots=True)
class MlxSettings:
    """What a checkpoint's configuration says of its layers."""

    usual: tuple[int, int]
    """Bits, and inputs of a group."""
    others: Mapping[str, tuple[int, int]]
    """Those of layers that differ, by their names; those of a stack of experts, by that of expert `*`."""

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> MlxSettings:
        """Read a `quantization`; raises `ModelError` for what cannot be read."""
        others = {name: each for name, each in settings.items() if isinstance(each, Mapping)}
        return cls(_sizes(settings), {_of_expert(name, "*"): _sizes(each) for name, each in others.items()})


def names_mlx(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration's `quantization` is one of MLX, which names no method."""
    return "quant_method" not in settings and "group_size" in settings and "bits" in settings


def _sizes(settings: Mapping[str, Any]) -> tuple[int, int]:
    bits, group, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if type(bits) is not int or bits not in _BITS or type(group) is not int or group < 1 or mode != "affine":
        raise ModelError(
            f"MLX weights of {bits} bits in groups of {group} (mode {mode}): read are 2, 3, 4, 5, 6 and 8 bits of the "
            "mode affine"
        )
    return bits, group


class MlxMatrix(GroupedMatrix):
    """A layer of an MLX checkpoint."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], settings: MlxSettings) -> None:
        """`tensors` are the layer's by `PARTS`; raises `ModelError` where they do not fit together."""
        for part in PARTS:
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
            check_matrix(f"{name}.{part}", tensors[part])
        self.name = name
        stack = re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
        self.bits, self.group_size = settings.others.get(stack, settings.usual)
        words, self._scales, self._minimums = (tensors[part] for part in PARTS)
        self.out_features, groups = self._scales.shape
        self.in_features = groups * self.group_size
        shape = (self.out_features, -(-self.in_features * self.bits // 32))
        check_shape(f"{name}.weight", words, shape, (torch.uint32,))
        if self.in_features * self.bits % 32:
            raise ModelError(f"{name}: {self.in_features} inputs of {self.bits} bits do not fill words")
        numbers = (torch.float16, torch.bfloat16, torch.float32)
        check_shape(f"{name}.scales", self._scales, (self.out_features, groups), numbers)
        check_shape(f"{name}.biases", self._minimums, (self.out_features, groups), numbers)
        self._words = words.view(torch.int32)

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        codes = unpacked(self._words[begin:end], self.bits)
        scales, minimums = (each[begin:end].float() for each in (self._scales, self._minimums))
        forget(self._words[begin:end])
        forget_at_the_end(self, end, self._scales, self._minimums)
        return Grouped(codes, scales, minimums, self.bits)


def as_transformers_has_it(family: str, name: str, tensor: Tensor) -> Tensor:
    """A tensor of plain numbers as models of the `family` have it in Transformers.

    MLX puts the channels of a convolution last, and 1 is added to norms' weights where a family's model adds it.
    """
    if family in _WITH_CONVOLUTIONS and tensor.ndim == 3 and tensor.shape[2] == 1:
        return tensor.movedim(2, 1).contiguous()
    if family in _NORMS_ADD_ONE and tensor.ndim == 1 and name.endswith(_NORMS):
        return tensor.float() - 1
    return tensor


def by_expert(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The layers of a file, in which each expert is a layer of its own."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for stem, parts in layers.items():
        for part, tensor in parts.items():
            for name, held in _experts(stem, tensor):
                found[name][part] = held
    return found


def _experts(stem: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a layer's experts, or the layer itself where it has none."""
    if tensor.ndim != 3 or _of_expert(stem, 0) == stem:
        yield stem, tensor
        return
    for expert, held in enumerate(tensor):
        yield _of_expert(stem, expert), held


def _of_expert(stem: str, expert: int | str) -> str:
    """What Transformers calls an expert's layer of a stack; the own name of any other layer."""
    stack = next((stack for stack in _STACKS if stack in stem), None)
    if stack is None:
        return stem
    block, _, layer = stem.rpartition(stack)
    layer = _OLD_NAMES.get(layer, layer) if block.endswith(".block_sparse_moe") else layer
    return f"{block.removesuffix('.experts')}.experts.{expert}.{layer}"
