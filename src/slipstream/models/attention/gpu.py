"""Which of PyTorch's attention kernels run on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which plans anew for every shape that it meets first. A text grows by a token a step, so most steps
of a young process meet one: on an H100 (PyTorch 2.11) a step of 5 ms took 43."""


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Let PyTorch choose among `KERNELS` within the body; nothing changes for a CPU."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(KERNELS)
