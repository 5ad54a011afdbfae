"""The activation of an MLP as an operator, with the product of gate and up.

`slipstream::activate` runs in Triton on a CUDA device; on a CPU in PyTorch, or in Triton's interpreter where
TRITON_INTERPRET is 1: for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.models.cuda.triton_use import runs_triton
from slipstream.models.families.activations import ACTIVATIONS

BLOCK = 1024
"""Numbers of a row that a program computes."""


@torch.library.custom_op("slipstream::activate", mutates_args=())
def activate(rows: Tensor, kind: int, is_gated: bool) -> Tensor:
    """rows [n, 2 · width], gates first -> [n, width]: activation(gate) · up. Without a gate [n, width] -> the same.

    `kind` is a number of `families.activations`.
    """
    num_rows, width = rows.shape
    size = width // 2 if is_gated else width
    if not runs_triton(rows):
        numbers = rows.float()
        found = _in_pytorch(numbers[:, :size], kind)
        return (found * numbers[:, size:] if is_gated else found).to(rows.dtype)
    from triton import cdiv

    from slipstream.models.cuda.layer_kernels import activate_rows

    output = rows.new_empty(num_rows, size)
    activate_rows[(num_rows, cdiv(size, BLOCK))](
        rows, output, rows.stride(0), size, kind, is_gated, BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return output


@activate.register_fake
def _(rows: Tensor, kind: int, is_gated: bool) -> Tensor:
    return rows.new_empty(len(rows), rows.shape[1] // 2 if is_gated else rows.shape[1])


def _in_pytorch(numbers: Tensor, kind: int) -> Tensor:
    if kind == ACTIVATIONS["silu"]:
        return functional.silu(numbers)
    if kind == ACTIVATIONS["relu2"]:
        return functional.relu(numbers).square()
    return functional.gelu(numbers, approximate="none" if kind == ACTIVATIONS["gelu"] else "tanh")
