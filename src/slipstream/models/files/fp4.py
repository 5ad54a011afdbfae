"""Folders of 4-bit floating-point numbers: NVFP4 (groups of 16) of compressed-tensors and ModelOpt, and MXFP4 (groups
of 32) of compressed-tensors.

Twice a number of 4 bits is an integer from -12 to 12, so a table of these is multiplied with half a group's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.files.compressed import groups_of_layers
from slipstream.models.files.grouped import (
    Grouped,
    GroupedMatrix,
    check_matrix,
    check_shape,
    forget_at_the_end,
    whole_groups,
)
from slipstream.models.linear.code_tables import FP4

PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
"""Names of a layer's tensors, as compressed-tensors has them. MXFP4 has no scale of a whole matrix."""
MODELOPT_PARTS = ("weight", "weight_scale", "weight_scale_2")
"""As `PARTS`, of ModelOpt, whose scale of a whole matrix is a factor, where the other is a divisor."""

_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def fp4_group(settings: Mapping[str, Any]) -> int | None:
    """Inputs of a group of a `quantization_config` of 4-bit floating-point numbers, None of another.

    Raises `ModelError` for settings that cannot be read.
    """
    found = {_GROUPS.get(form) for _, form in groups_of_layers(settings)}
    return found.pop() if len(found) == 1 else None


def check_modelopt(settings: Mapping[str, Any]) -> str:
    """What a `quantization_config` of ModelOpt says that its weights are: 'NVFP4' or 'FP8'.

    Raises `ModelError` for what cannot be read.
    """
    found = settings.get("quant_algo")
    if found not in ("NVFP4", "FP8"):
        raise ModelError(f"ModelOpt weights of the kind {found!s:.40}: read are NVFP4 and FP8")
    return str(found)


class Fp4Matrix(GroupedMatrix):
    """A layer of 4-bit floating-point numbers."""

    bits, table, is_symmetric = 4, FP4, True

    def __init__(self, name: str, tensors: Mapping[str, Tensor], group_size: int) -> None:
        """`tensors` are the layer's by `PARTS` or `MODELOPT_PARTS`.

        Raises `ModelError` where they do not fit together.
        """
        self._divides = "weight" not in tensors
        codes, scale, of_all = PARTS if self._divides else MODELOPT_PARTS
        has_scale_of_all = group_size == _GROUPS["nvfp4-pack-quantized"]
        for part in (codes, scale, of_all)[: 2 + has_scale_of_all]:
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
        self.name, self.group_size = name, group_size
        self._stored, self._scales = tensors[codes], tensors[scale]
        check_matrix(f"{name}.{codes}", self._stored)
        check_shape(f"{name}.{codes}", self._stored, tuple(self._stored.shape), (torch.uint8,))
        self.out_features, self.in_features = self._stored.shape[0], 2 * self._stored.shape[1]
        shape = (self.out_features, whole_groups(name, self.in_features, group_size))
        self._of_all = torch.ones(1)
        if has_scale_of_all:
            check_shape(f"{name}.{scale}", self._scales, shape, (torch.float8_e4m3fn,))
            self._of_all = tensors[of_all].flatten()
            check_shape(f"{name}.{of_all}", self._of_all, (1,), (torch.float32,))
        else:
            check_shape(f"{name}.{scale}", self._scales, shape, (torch.uint8, torch.float8_e8m0fnu))
            self._scales = self._scales.view(torch.float8_e8m0fnu)  # powers of two

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        stored = self._stored[begin:end]
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
        forget(stored)
        scales = self._scales[begin:end].float()
        scales = (scales / self._of_all if self._divides else scales * self._of_all) / 2
        forget_at_the_end(self, end, self._scales)
        return Grouped(codes, scales, None, 4, FP4)
