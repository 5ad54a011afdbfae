"""AWQ's layout, as AutoAWQ writes it for its GEMM kernel: integers and zero points are packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.grouped import (
    Grouped,
    GroupedMatrix,
    check_matrix,
    check_shape,
    forget_at_the_end,
    unpacked,
    whole_groups,
)

PARTS = ("qweight", "qzeros", "scales")
"""Names of a layer's tensors."""

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's eight places each of eight outputs lies."""


def awq_group_size(settings: Mapping[str, Any]) -> int | None:
    """Return a `quantization_config`'s group size, -1 for one group, None where layers may differ (`dynamic`).

    Raises `ModelError` for what cannot be read.
    """
    bits = settings.get("bits", settings.get("w_bit"))
    group = settings.get("group_size", settings.get("q_group_size", 128))
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or type(group) is not int:
        raise ModelError(f"AWQ weights of {bits} bits in groups of {group}: read are those of 4 bits")
    if version != "gemm":
        raise ModelError(f"AWQ weights in the layout {version!r}: read is gemm")
    if not settings.get("zero_point", True):
        raise ModelError("AWQ weights without zero points are not read")
    return None if settings.get("dynamic") else group


class AwqMatrix(GroupedMatrix):
    """A layer of an AWQ checkpoint."""

    bits = 4

    def __init__(self, name: str, tensors: Mapping[str, Tensor], group_size: int | None) -> None:
        """`tensors` are the layer's by `PARTS`, whose scales say the size of groups where it is None.

        Raises `ModelError` where they do not fit together.
        """
        for part in PARTS:
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
        self.name = name
        self._words, self._scales = tensors["qweight"], tensors["scales"]
        check_matrix(f"{name}.qweight", self._words)
        self.in_features, words = self._words.shape
        self.out_features = 8 * words
        check_matrix(f"{name}.scales", self._scales)
        size = self.in_features // len(self._scales) if group_size is None else group_size
        groups = whole_groups(name, self.in_features, size)
        self.group_size = self.in_features // groups
        numbers = (torch.float16, torch.bfloat16, torch.float32)
        check_shape(f"{name}.qweight", self._words, (self.in_features, words), (torch.int32,))
        check_shape(f"{name}.qzeros", tensors["qzeros"], (groups, words), (torch.int32,))
        check_shape(f"{name}.scales", self._scales, (groups, self.out_features), numbers)
        self._zeros = tensors["qzeros"]

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        words = slice(begin // 8, -(-end // 8))
        within = slice(begin - 8 * words.start, end - 8 * words.start)
        codes, zeros = (_outputs(part[:, words])[:, within] for part in (self._words, self._zeros))
        scales = self._scales[:, begin:end].T.float().contiguous()
        forget_at_the_end(self, end, self._words, self._scales, self._zeros)
        return Grouped(codes.T.contiguous(), scales, -(zeros.T * scales), self.bits)


def _outputs(words: Tensor) -> Tensor:
    """int32 [n, words] -> uint8 [n, 8 * words], in the outputs' order."""
    packed = unpacked(words, 4).view(len(words), -1, 8)
    return packed[..., list(_PLACES)].flatten(1)
