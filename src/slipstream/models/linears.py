"""Linear layers for a CPU: several rows for little more than the price of one.

Checking five draft tokens with PyTorch's own float32 linear costs about as much as five tokens: its kernel for one
row reads the weights at memory speed, but the one for a few rows repacks them at every call. oneDNN's kernel over
weights that were packed once does not (docs/LOG.md has the measurements). This is what makes speculation pay on a CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn

TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""Numbers of rows that the kernel is called with: rows are padded to the next one, and split beyond the last.

oneDNN compiles a kernel for every number of rows and shape that it meets, about 0.6 MB each, and keeps a thousand of
them: with any number of rows the process grew by half a gigabyte. A few numbers of rows also mean few ways in which
a row's last bits can depend on its neighbours."""

_TILES = frozenset(TILES)


class PackedLinear(nn.Module):
    """A float32 linear layer whose weight lives in oneDNN's own layout, and nowhere else."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Opaque to everything but the operator below, so no parameter: it can be neither moved nor saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.in_features * self.out_features * torch.float32.itemsize

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if rows.numel() // self.in_features in _TILES:
            return self._multiply(rows)
        flat = rows.reshape(-1, self.in_features)
        largest = TILES[-1]
        tiles = [self._padded(flat[begin : begin + largest]) for begin in range(0, len(flat), largest)]
        output = torch.cat(tiles) if tiles else rows.new_empty(0, self.out_features)
        return output.view(*rows.shape[:-1], self.out_features)

    def _padded(self, rows: Tensor) -> Tensor:
        """[n, in_features] -> [n, out_features] for n from 1 to the largest tile."""
        size = TILES[bisect_left(TILES, len(rows))]
        return self._multiply(nn.functional.pad(rows, (0, 0, 0, size - len(rows))))[: len(rows)]

    def _multiply(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


def pack_linears(model: Any) -> int:
    """Replace the float32 linear layers of a CPU model in place; returns how many.

    Only plain `nn.Linear`s are replaced: a subclass may compute something else. The unpacked weights are freed,
    except where an embedding shares them.
    """
    if model.device.type != "cpu" or not torch._C._has_mkldnn:
        return 0
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype == torch.float32
        and child.weight.device.type == "cpu"
    ]
    for parent, name, child in plain:
        setattr(parent, name, PackedLinear(child))
    return len(plain)
