"""The most that a device can do: bytes read and floating-point operations a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from slipstream.models.linear.formats import WeightFormat
from slipstream.profiling.machine import last_level_cache_bytes
from slipstream.profiling.memory import available_bytes

CACHES_FULL = 8
"""The memory's bandwidth is measured over an array of at least so many last-level caches, which keep little of it."""

_SHORTEST_READING_S = 0.005
_MATRIX = 1024
_MATRIX_ROWS = (64, 1024)
"""A tile of the packed linear layers, and a square product."""


class ReadStream:
    """An array that is read from one end to the other."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._array = torch.ones(
            max(num_bytes // 4, 1), dtype=torch.float32, device=device
        )  # written, so that its pages exist

    def bytes_per_s(self) -> float:
        """One reading, by the faster of two reductions. Neither can read faster than the hardware."""
        return self._array.nbytes / fastest_s([self._array.sum, self._array.amax], self._device)


class MatrixProduct:
    """Matrix products in one dtype and weight format: PyTorch's own, and the packed forms where there are any."""

    def __init__(self, dtype: torch.dtype, fmt: WeightFormat, device: torch.device) -> None:
        self._device = device
        plain = nn.Linear(_MATRIX, _MATRIX, bias=False, dtype=dtype, device=device).requires_grad_(False)
        self._layers: list[nn.Module] = [plain] if fmt.weight_error is None else []
        if device.type == "cpu" and dtype == torch.float32:
            forms = fmt.forms(plain)
            # PyTorch's form of a format that rounds is there for machines without the native one, which is faster.
            self._layers += forms if fmt.weight_error is None else forms[:1]
        self._rows = [torch.ones(num_rows, _MATRIX, dtype=dtype, device=device) for num_rows in _MATRIX_ROWS]

    def flops_per_s(self) -> float:
        """One reading, of the fastest form and shape."""
        rates = []
        for rows in self._rows:  # [rows, _MATRIX]
            kinds = [lambda layer=layer, rows=rows: layer(rows) for layer in self._layers]
            rates.append(2 * rows.numel() * _MATRIX / fastest_s(kinds, self._device))
        return max(rates)


def memory_array_bytes(least: int, device: torch.device) -> int:
    """Size of an array of at least `least` bytes that no cache holds; at most a quarter of the free memory."""
    return min(max(least, CACHES_FULL * last_level_cache_bytes()), available_bytes(device) // 4)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def fastest_s(kinds: Iterable[Callable[[], object]], device: torch.device) -> float:
    """Seconds of the shortest run. Short ones are repeated, since the first finds cold caches."""
    fastest_s = float("inf")
    for run in kinds:
        spent_s = 0.0
        while spent_s < _SHORTEST_READING_S:
            started_s = time.perf_counter()
            run()
            synchronize(device)
            run_s = time.perf_counter() - started_s
            spent_s += run_s
            fastest_s = min(fastest_s, run_s)
    return fastest_s
