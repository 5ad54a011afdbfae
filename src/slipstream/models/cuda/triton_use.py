"""Where the operators of this room run."""

from __future__ import annotations

import os

from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operator over this tensor is computed by its Triton kernel: on a CUDA device, and for tests where
    TRITON_INTERPRET is 1, in Triton's interpreter. Else PyTorch computes it."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
