"""Functions whose bits do not depend on where a number lies: PyTorch computes a tensor's last ones otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(numbers: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20, as PyTorch has it."""
    return torch.where(numbers > 20, numbers, numbers.clamp(max=20).exp().log1p())


def silu(numbers: Tensor) -> Tensor:
    """x / (1 + exp(-x))"""
    return numbers / (1 + (-numbers).exp())
