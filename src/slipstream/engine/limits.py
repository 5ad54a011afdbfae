"""The best that a device can do: bytes read and floating-point operations a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from slipstream.control.machine import last_level_cache_bytes
from slipstream.engine.memory import available_bytes
from slipstream.models.linears import PackedLinear

CACHES_FULL = 8
"""The memory's bandwidth is measured over an array of so many last-level caches: almost none of it can stay in one."""

_LEAST_ARRAY_BYTES = 256 * 2**20
_MATRIX = 1024
_MATRIX_ROWS = (64, 1024)
"""A tile of the packed linear layers, and a square product."""


def memory_array_bytes(device: torch.device) -> int:
    """Size of an array that no cache holds, and no more than a quarter of the free memory."""
    wanted = max(_LEAST_ARRAY_BYTES, CACHES_FULL * last_level_cache_bytes())
    return min(wanted, available_bytes(device) // 4)


def read_bandwidth(num_bytes: int, device: torch.device, seconds: float) -> float:
    """Bytes a second at which an array of `num_bytes` is read from one end to the other, over and over.

    The fastest pass of several kinds: whichever reduction is the fastest, none can read faster than the hardware.
    """
    array = torch.ones(max(num_bytes // 4, 1), dtype=torch.float32, device=device)  # written, so really there
    reductions = (array.sum, array.amax, lambda: torch.linalg.vector_norm(array))
    share_s = seconds / len(reductions)
    return array.nbytes / min(_fastest_s(reduction, device, share_s) for reduction in reductions)


def flop_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Floating-point operations a second of a matrix product: the fastest of PyTorch's own and the packed one."""
    weight = nn.Linear(_MATRIX, _MATRIX, bias=False, dtype=dtype, device=device).requires_grad_(False)
    packs = device.type == "cpu" and dtype == torch.float32 and torch._C._has_mkldnn
    layers = (weight, PackedLinear(weight)) if packs else (weight,)
    share_s = seconds / len(layers) / len(_MATRIX_ROWS)
    rates = []
    for num_rows in _MATRIX_ROWS:
        rows = torch.ones(num_rows, _MATRIX, dtype=dtype, device=device)
        operations = 2 * num_rows * _MATRIX**2
        rates += [operations / _fastest_s(lambda f=layer, x=rows: f(x), device, share_s) for layer in layers]
    return max(rates)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _fastest_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three after one that warms up."""
    work()
    synchronize(device)
    runs: list[float] = []
    while len(runs) < 3 or sum(runs) < seconds:
        started_s = time.perf_counter()
        work()
        synchronize(device)
        runs.append(time.perf_counter() - started_s)
    return min(runs)
