"""compressed-tensors' layouts of 4-bit floating-point numbers: NVFP4 (groups of 16) and MXFP4 (groups of 32).

Twice a number of 4 bits is an integer from -12 to 12. So the file's numbers are codes of 5 bits, from -16 on, times
half the scale of their group.
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
)

PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
"""Names of a layer's tensors. MXFP4 has no scale of a whole matrix."""

_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_CODES = torch.tensor([16 + number for number in _DOUBLED] + [16 - number for number in _DOUBLED]).to(
    torch.uint8
)


def fp4_group(settings: Mapping[str, Any]) -> int | None:
    """Inputs of a group of a `quantization_config` of 4-bit floating-point numbers, None of another.

    Raises `ModelError` for settings that cannot be read.
    """
    found = {_GROUPS.get(form) for _, form in groups_of_layers(settings)}
    return found.pop() if len(found) == 1 else None


class Fp4Matrix(GroupedMatrix):
    """A layer of a compressed-tensors checkpoint of 4-bit floating-point numbers."""

    bits = 5
    is_symmetric = True

    def __init__(self, name: str, tensors: Mapping[str, Tensor], group_size: int) -> None:
        """`tensors` are the layer's by `PARTS`; raises `ModelError` where they do not fit together."""
        needed = PARTS if group_size == _GROUPS["nvfp4-pack-quantized"] else PARTS[:2]
        for part in needed:
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
        self.name, self.group_size = name, group_size
        self._stored, scales = tensors["weight_packed"], tensors["weight_scale"]
        check_matrix(f"{name}.weight_packed", self._stored)
        check_shape(f"{name}.weight_packed", self._stored, tuple(self._stored.shape), (torch.uint8,))
        self.out_features, self.in_features = self._stored.shape[0], 2 * self._stored.shape[1]
        shape = (self.out_features, -(-self.in_features // group_size))
        if self.in_features % group_size:
            raise ModelError(f"{name}: groups of {group_size} do not divide its {self.in_features} inputs")
        self._whole = torch.ones(())
        if needed is PARTS:
            check_shape(f"{name}.weight_scale", scales, shape, (torch.float8_e4m3fn,))
            self._whole = tensors["weight_global_scale"].flatten()
            check_shape(f"{name}.weight_global_scale", self._whole, (1,), (torch.float32,))
        else:
            check_shape(f"{name}.weight_scale", scales, shape, (torch.uint8, torch.float8_e8m0fnu))
            scales = scales.view(torch.float8_e8m0fnu)  # powers of two
        self._scales = scales

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        codes, scales = self._read(begin, end)
        return Grouped(codes, scales, -16 * scales, 5)

    def widened(self, begin: int, end: int) -> Tensor:
        """See `GroupedMatrix.widened`: rounded once. With scales of 32 bits a sum with a minimum would round twice."""
        codes, scales = self._read(begin, end)
        return (codes.float() - 16) * scales.repeat_interleave(self.group_size, 1)

    def _read(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Codes uint8 [end - begin, in], and half the scales of their groups float32."""
        stored = self._stored[begin:end]
        codes = _CODES[torch.stack([stored & 15, stored >> 4], -1).flatten(1).int()]
        forget(stored)
        scales = self._scales[begin:end].float() / self._whole / 2
        forget_at_the_end(self, end, self._scales)
        return codes, scales
