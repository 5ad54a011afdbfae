"""What models in codes compute with on a CPU, and how far their logits are from others."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models import CausalLM, RowGroup

DECODER: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:KernelsOnCpu",
    "cpu_kernels": "torch",
}
"""What computes as on a GPU."""


def logits(lm: CausalLM) -> torch.Tensor:
    pool = lm.new_cache(64, prefix_caching=False).pool
    return lm.forward([RowGroup(pool.slots, 0, [1, 5, 9, 3, 7], [0, 4])], pool).logits.float()


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
