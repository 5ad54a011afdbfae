"""Which of PyTorch's attention kernels run on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which plans anew for every shape. A text grows by a token a step, so each step has a new shape, and
planning took 3 ms a layer where the pass itself takes less (one H100, PyTorch 2.11)."""


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Let PyTorch choose among `KERNELS` within the body; nothing changes for a CPU."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(KERNELS)
