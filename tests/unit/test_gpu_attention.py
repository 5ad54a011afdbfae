"""Passes on a GPU leave cuDNN's attention out, and nothing else in the process notices."""

from __future__ import annotations

import torch
from torch.backends import cuda

from slipstream.models.attention.gpu import attention_kernels


def flags() -> tuple[bool, ...]:
    return (
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def test_cudnn_is_left_out_on_a_gpu_alone() -> None:
    before = flags()
    assert before == (True,) * 4
    with attention_kernels(torch.device("cuda")):
        assert flags() == (False, True, True, True)
    with attention_kernels(torch.device("cpu")):
        assert flags() == before
    assert flags() == before
