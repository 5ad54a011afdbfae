"""FP8 weights with a scale for each block, output or matrix: converted to 16 or 32 bits while they are read, unless the
fused decoder of a GPU keeps them.

Their layouts are Transformers' `fp8` (as DeepSeek and Qwen
publish their checkpoints) and compressed-tensors' `float-quantized`. Activations are not rounded to FP8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import release
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.grouped import check_matrix
from slipstream.models.linear.fp8 import Fp8Linear

PARTS = ("weight", "weight_scale_inv", "weight_scale")
"""Names of a layer's tensors that its weight needs."""

_SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
_PART_WEIGHTS = 2**22
"""So many weights are converted at a time."""


def is_fp8(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a layer of these tensors has an FP8 weight."""
    return "weight" in tensors and tensors["weight"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


class Fp8Matrix(ConvertedMatrix):
    """A layer whose weight is FP8 numbers times the scale of their block."""

    kind = "FP8"

    def __init__(self, name: str, tensors: Mapping[str, Tensor], block: tuple[int, int] | None) -> None:
        """`tensors` are the layer's by `PARTS`, `block` the outputs and inputs that share a scale.

        None is read off the scales: one for each output or for the whole matrix. Raises `ModelError` where the tensors
        do not fit together.
        """
        self._weight = tensors["weight"]
        part = next((part for part in PARTS[1:] if part in tensors), None)
        if part is None:
            raise ModelError(f"{name} holds FP8 numbers and lacks weight_scale_inv")
        scales = tensors[part]
        check_matrix(f"{name}.weight", self._weight)
        if not scales.numel():
            raise ModelError(f"{name}.{part} is empty")
        outputs, inputs = self._weight.shape
        if block is None:
            if scales.numel() == 1:
                scales, block = scales.reshape(1, 1), (outputs, inputs)
            else:
                scales, block = scales.reshape(len(scales), -1), (1, inputs)
        want = (-(-outputs // block[0]), -(-inputs // block[1]))
        if tuple(scales.shape) != want:
            have = " x ".join(map(str, scales.shape)) or "one number"
            raise ModelError(f"{name}.{part} is {have}, and its layer needs {want[0]} x {want[1]}")
        if scales.dtype not in _SCALE_TYPES:
            raise ModelError(f"{name}.{part} holds {str(scales.dtype).removeprefix('torch.')} numbers")
        self._scales, self._block = scales.float(), block
        is_group = block[1] >= inputs or block[1] % 16 == 0
        self.can_be_kept = self._weight.dtype == torch.float8_e4m3fn and is_group

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._weight.shape[0], self._weight.shape[1]

    def layer(self, bias: Tensor | None = None) -> Fp8Linear:
        """See `ConvertedMatrix.layer`."""
        return Fp8Linear(self._weight, self._scales, self._block, bias)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """See `ConvertedMatrix.widened`."""
        outputs, inputs = self._weight.shape
        found = torch.empty(outputs, inputs, dtype=dtype)
        rows = max(_PART_WEIGHTS // inputs, 1)
        for begin in range(0, outputs, rows):
            part = self._weight[begin : begin + rows]
            blocks = torch.arange(begin, begin + len(part)) // self._block[0]
            scales = self._scales[blocks].repeat_interleave(self._block[1], 1)[:, :inputs]
            found[begin : begin + rows] = part.float() * scales
            release(part)
        return found


def block_size(settings: Mapping[str, object]) -> tuple[int, int] | None:
    """Return a `quantization_config`'s block size, or None. Raises `ModelError` for one that is no two sizes."""
    size = settings.get("weight_block_size")
    if size is None:
        return None
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise ModelError(f"FP8 weights in blocks of {size}: a block has two sizes")
    return size[0], size[1]
