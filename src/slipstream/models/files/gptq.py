"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

Integers are packed along the inputs, zero points along the outputs. The older format stores every zero point less 1.
With act-order, the inputs of a group do not lie together, and an index says which group each is of.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    sorted_by_group,
    unpacked,
    whole_groups,
    word_run,
)

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Names of a layer's tensors."""

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """What a checkpoint's configuration says of its layers."""

    bits: int
    group_size: int
    """-1: one group of all inputs."""
    act_order: bool
    zeros_less_one: bool
    differ: bool = False
    """Whether layers may have other bits and groups, which are read off the shapes of their tensors."""

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> GptqSettings:
        """Read a `quantization_config`; raises `ModelError` for what cannot be read."""
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        if type(bits) is not int or bits not in BITS or type(group) is not int:
            raise ModelError(f"GPTQ weights of {bits} bits in groups of {group}: read are 2, 3, 4 and 8 bits")
        form = settings.get("checkpoint_format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise ModelError(f"GPTQ weights in the format {form!r}: read are gptq and gptq_v2")
        differ = bool(settings.get("dynamic"))
        return cls(bits, group, bool(settings.get("desc_act", False)), form == "gptq", differ)


class GptqMatrix(GroupedMatrix):
    """A layer of a GPTQ checkpoint."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], settings: GptqSettings) -> None:
        """`tensors` are the layer's by `PARTS`; raises `ModelError` where they do not fit together."""
        for part in PARTS[:3]:
            if part not in tensors:
                raise ModelError(f"{name} lacks {part}")
        self.name, self._less_one = name, settings.zeros_less_one
        self._words, self._zeros, self._scales = (tensors[part] for part in PARTS[:3])
        for part in PARTS[:3]:
            check_matrix(f"{name}.{part}", tensors[part])
        rows, self.out_features = self._words.shape
        self.bits, group = settings.bits, settings.group_size
        if settings.differ:
            self.bits = self._zeros.shape[1] * 32 // self.out_features
            group = max(rows * 32 // max(self.bits, 1) // len(self._scales), 1)
            if len(self._scales) > 1 and group & (group - 1):
                # The last group of such a layer is shorter than the others, whose size is not known.
                raise ModelError(
                    f"{name}: the size of its {len(self._scales)} groups is not known, since layers differ; it is read "
                    "where it is a power of two"
                )
        if self.bits not in BITS:
            raise ModelError(f"{name} has {self.bits} bits: read are 2, 3, 4 and 8")
        each, words = word_run(self.bits)
        self.in_features = rows * 32 // self.bits
        groups = whole_groups(name, self.in_features, group)
        self.group_size = self.in_features // groups
        if self.out_features % each or rows % words:
            raise ModelError(
                f"{name}: {self.in_features} x {self.out_features} numbers do not fill its words"
            )
        numbers = (torch.float16, torch.bfloat16, torch.float32)
        check_shape(f"{name}.qweight", self._words, (rows, self.out_features), (torch.int32,))
        check_shape(f"{name}.scales", self._scales, (groups, self.out_features), numbers)
        check_shape(
            f"{name}.qzeros", self._zeros, (groups, self.out_features // each * words), (torch.int32,)
        )
        half = 2 ** (self.bits - 1)
        self.is_symmetric = bool((unpacked(self._zeros, self.bits) == half - self._less_one).all())
        forget(self._zeros)
        index = tensors.get("g_idx")
        if index is None and settings.act_order and groups > 1:
            raise ModelError(f"{name} was quantised in act-order (desc_act) and lacks its index g_idx")
        if index is not None:
            check_shape(f"{name}.g_idx", index, (self.in_features,), (torch.int32, torch.int64))
            self.order = sorted_by_group(name, index, groups)

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        each, words = word_run(self.bits)
        codes = unpacked(self._words[:, begin:end].T.contiguous(), self.bits)
        if self.order is not None:
            codes = codes[:, self.order]
        first = begin // each
        zeros = unpacked(self._zeros[:, first * words : -(-end // each) * words], self.bits)
        zeros = zeros[:, begin - first * each : end - first * each]
        if self._less_one:
            zeros = zeros + 1 & 2**self.bits - 1
        scales = self._scales[:, begin:end].T.float().contiguous()
        forget_at_the_end(self, end, self._words, self._scales, self._zeros)
        return Grouped(codes, scales, -(zeros.T * scales), self.bits)
