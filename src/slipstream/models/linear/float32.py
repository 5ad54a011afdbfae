"""float32 weights: the checkpoint's own numbers, packed so that several rows cost little more than one.

PyTorch's float32 linear layer takes about five times as long for five rows as for one: its kernel for one row reads
the weights at memory speed, but the one for a few rows repacks them at every call. Weights that were packed once need
not be (docs/LOG.md has the measurements). Speculation pays on a CPU because of this.

The native kernels read packed weights at memory speed for any few rows. Where they cannot be compiled, oneDNN's are
the next best.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.layers import PackedLinear

TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""Numbers of rows that oneDNN's kernel is called with: rows are padded to the next one, and split beyond the last.

oneDNN compiles a kernel for every number of rows and shape that it meets, about 0.6 MB each, and keeps a thousand of
them: with any number of rows the process grew by half a gigabyte. A few numbers of rows also mean few ways in which
a row's last bits can depend on its neighbours."""

_TILES = frozenset(TILES)


class OneDnnLinear(PackedLinear):
    """A float32 linear layer whose weight lives in oneDNN's own layout, and nowhere else."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.in_features * self.out_features * torch.float32.itemsize

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() // self.in_features in _TILES:
            return self._multiply(rows)
        flat = rows.reshape(-1, self.in_features)
        largest = TILES[-1]
        tiles = [self._padded(flat[begin : begin + largest]) for begin in range(0, len(flat), largest)]
        output = torch.cat(tiles) if tiles else rows.new_empty(0, self.out_features)
        return output.view(*rows.shape[:-1], self.out_features)

    def unpack(self, outputs: Tensor) -> Tensor:
        weight: Tensor = self._packed.to_dense()  # [out, in]
        return weight[outputs]

    def _padded(self, rows: Tensor) -> Tensor:
        """[n, in_features] -> [n, out_features] for n from 1 to the largest tile."""
        size = next(size for size in TILES if size >= len(rows))
        return self._multiply(nn.functional.pad(rows, (0, 0, 0, size - len(rows))))[: len(rows)]

    def _multiply(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class Float32(WeightFormat):
    """Four bytes a weight, the checkpoint's numbers."""

    summary = "32-bit floating point"
    kernel: ClassVar[Kernel] = Kernel(kind=0, pack="slipstream_pack_float32", bytes_per_weight=4)
    bytes_per_weight = kernel.bytes_per_weight
    stored_dtype = torch.float32

    def torch_unavailable(self) -> str | None:
        """oneDNN may be missing from a build of PyTorch."""
        return None if torch._C._has_mkldnn else "this build of PyTorch has no oneDNN"

    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        return OneDnnLinear(linear)
