"""The integer layouts of compressed-tensors: `pack-quantized` (words of 4 or 8 bits) and `int-quantized` (bytes).

Integers are packed along the inputs and hold half their range more than the number. Activations that a checkpoint wants
rounded to 8 bits are rounded by our own kernels, a row at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.files.fp8 import block_size
from slipstream.models.files.grouped import (
    Grouped,
    GroupedMatrix,
    check_matrix,
    check_shape,
    forget_at_the_end,
    sorted_by_group,
    unpacked,
    whole_groups,
)

PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
"""Names of a layer's tensors that its weight needs."""
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    """How the integers of a group of layers are stored."""

    bits: int
    group_size: int
    """-1: a scale an output."""
    one_scale: bool
    """For the whole matrix."""
    is_packed: bool
    act_order: bool
    symmetric: bool
    """Whether layers may lack zero points: a code of half the range is nothing then."""

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> CompressedSettings:
        """Read a `quantization_config`; raises `ModelError` for what cannot be read."""
        found = {
            cls._of_group(weights, form or "pack-quantized") for weights, form in groups_of_layers(settings)
        }
        if len(found) > 1:
            raise ModelError("compressed-tensors weights in groups of layers that differ are not read")
        return found.pop()

    @classmethod
    def _of_group(cls, weights: Mapping[str, Any], form: str) -> CompressedSettings:
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        named = f"compressed-tensors weights ({form}, {kind} of {bits} bits, a scale a {strategy})"
        fits = kind == "int" and (bits == 8 or (bits == 4 and form == "pack-quantized"))
        if form not in _FORMATS or not fits or strategy not in ("group", "channel", "tensor"):
            raise ModelError(
                f"{named} are not read: known are integers of 4 and 8 bits with a scale a group, channel or tensor, "
                "floats of 8 bits, and nvfp4-pack-quantized and mxfp4-pack-quantized"
            )
        size = weights.get("group_size") if strategy == "group" else -1
        if type(size) is not int:
            raise ModelError(f"{named} do not say the size of their groups")
        symmetric = weights.get("symmetric", True)
        if not isinstance(symmetric, bool):
            raise ModelError(f"{named} say {symmetric!r} of whether they are symmetric")
        return cls(
            int(bits or 0),
            size,
            strategy == "tensor",
            form == "pack-quantized",
            weights.get("actorder") == "group",
            symmetric,
        )


def is_fp8(settings: Mapping[str, Any]) -> bool:
    """Whether all groups of layers of a `quantization_config` have floating-point weights of 8 bits.

    Raises `ModelError` for settings that cannot be read.
    """
    return all(
        weights.get("type") == "float" and weights.get("num_bits") == 8
        for weights, _ in groups_of_layers(settings)
    )


def fp8_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale of FP8 weights, None for an output's or the matrix's.

    Raises `ModelError` for settings that cannot be read.
    """
    found = set()
    for weights, named in groups_of_layers(settings):
        form, strategy = named or "float-quantized", weights.get("strategy") or "tensor"
        if form not in _FP8_FORMATS or strategy not in ("tensor", "channel", "block"):
            raise ModelError(
                f"compressed-tensors weights ({form}, float of 8 bits, a scale a {strategy}) are not read"
            )
        size = weights.get("block_structure")
        if strategy == "block" and size is None:
            raise ModelError(
                "compressed-tensors weights (float of 8 bits) do not say the size of their blocks"
            )
        found.add(block_size({"weight_block_size": size}) if strategy == "block" else None)
    if len(found) > 1:
        raise ModelError("compressed-tensors weights in groups of layers that differ are not read")
    return found.pop()


def groups_of_layers(settings: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """What a `quantization_config` says of the weights of each group of layers, and of their format ('': nothing).

    Raises `ModelError` for damaged settings, and for weights that are more than integers or FP8 numbers and scales.
    """
    if settings.get("transform_config"):
        raise ModelError(
            "compressed-tensors weights with online rotations (transform_config), which are not read"
        )
    sparsity = settings.get("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if form != "dense":
        raise ModelError(
            f"compressed-tensors weights that are sparse (sparsity_config: {form}), which are not read"
        )
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("compressed-tensors weights without config_groups")
    found = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else group
        weights = {} if weights is None else weights
        if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
            raise ModelError(
                f"compressed-tensors weights with a damaged group {name!r} in config_groups: it and its weights must "
                "be JSON objects"
            )
        found.append((weights, str(group.get("format") or settings.get("format") or "")))
    return found


class CompressedMatrix(GroupedMatrix):
    """A layer of a compressed-tensors checkpoint."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], settings: CompressedSettings) -> None:
        """`tensors` are the layer's by `PARTS`; raises `ModelError` where they do not fit together."""
        stored = "weight_packed" if settings.is_packed else "weight"
        more = (*(["weight_shape"] * settings.is_packed), *(["weight_zero_point"] * (not settings.symmetric)))
        for part in (stored, "weight_scale", *more):
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
        self.name, self.bits, self._is_packed = name, settings.bits, settings.is_packed
        self._stored, scale = tensors[stored], tensors["weight_scale"]
        check_matrix(f"{name}.{stored}", self._stored)
        each = 32 // self.bits
        self.out_features, self.in_features = self._stored.shape
        if settings.is_packed:
            check_shape(f"{name}.weight_shape", tensors["weight_shape"], (2,), (torch.int32, torch.int64))
            shape = tensors["weight_shape"].tolist()
            if shape[1] < 1 or -(-shape[1] // each) != self._stored.shape[1]:
                raise ModelError(
                    f"{name}.weight_shape is {shape}, and its words are {list(self._stored.shape)}"
                )
            self.in_features = int(shape[1])
            check_shape(
                f"{name}.{stored}", self._stored, (int(shape[0]), self._stored.shape[1]), (torch.int32,)
            )
        else:
            check_shape(f"{name}.{stored}", self._stored, tuple(self._stored.shape), (torch.int8,))
        groups = whole_groups(name, self.in_features, settings.group_size)
        self.group_size = self.in_features // groups
        if settings.one_scale and scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(self.out_features, 1)
        scale = scale[:, None] if scale.ndim == 1 else scale
        numbers = (torch.float16, torch.bfloat16, torch.float32)
        check_shape(f"{name}.weight_scale", scale, (self.out_features, groups), numbers)
        self._scales = scale
        self._zeros = self._checked_zeros(tensors.get("weight_zero_point"), groups)
        self.is_symmetric = "weight_zero_point" not in tensors
        index = tensors.get("weight_g_idx")
        if index is None and settings.act_order and groups > 1:
            raise ModelError(
                f"{name} was quantised in act-order (actorder: group) and lacks its index weight_g_idx"
            )
        if index is not None and groups > 1 and not bool((index == -1).all()):
            check_shape(f"{name}.weight_g_idx", index, (self.in_features,), (torch.int32, torch.int64))
            self.order = sorted_by_group(name, index, groups)

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        if self._is_packed:
            codes = unpacked(self._stored[begin:end], self.bits)[:, : self.in_features]
        else:
            codes = self._stored[begin:end].view(torch.uint8) ^ 128  # two's complement, from 0 on
        if self.order is not None:
            codes = codes[:, self.order]
        scales = self._scales[begin:end].float().contiguous()
        found = Grouped(codes.contiguous(), scales, -(self._zero_points(begin, end) * scales), self.bits)
        forget(self._stored[begin:end])
        forget_at_the_end(self, end, self._scales, *([] if self._zeros is None else [self._zeros]))
        return found

    def _checked_zeros(self, stored: Tensor | None, groups: int) -> Tensor | None:
        """Zero points as they are stored, words along the outputs or bytes [out, groups]; None where there are none."""
        if stored is None:
            return None
        name = f"{self.name}.weight_zero_point"
        if stored.dtype == torch.int32:
            check_shape(name, stored, (-(-self.out_features * self.bits // 32), groups), (torch.int32,))
            return stored
        if stored.numel() == 1:
            stored = stored.reshape(1, 1).expand(self.out_features, groups)
        stored = stored[:, None] if stored.ndim == 1 else stored
        check_shape(name, stored, (self.out_features, groups), (torch.int8,))
        return stored

    def _zero_points(self, begin: int, end: int) -> Tensor | float:
        """float32 [end - begin, groups], as the codes are: half of their range where the checkpoint has none."""
        half = 2.0 ** (self.bits - 1)
        if self._zeros is None:
            return half
        if self._zeros.dtype == torch.int8:
            zeros: Tensor = self._zeros[begin:end].float() + half
            return zeros
        each = 32 // self.bits
        words = slice(begin // each, -(-end // each))
        found = unpacked(self._zeros[words].T.contiguous(), self.bits).T
        return found[begin - words.start * each : end - words.start * each].float()
