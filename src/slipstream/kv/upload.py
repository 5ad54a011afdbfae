"""Brings numbers to a device without waiting for it, and from there with one wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(numbers: NDArray[np.int64] | NDArray[np.float32] | Sequence[int], device: torch.device) -> Tensor:
    """The numbers on `device`, int64 where they are in a list; on the CPU an array's own memory.

    CUDA copies memory that is not pinned while the host waits, so they go by way of pinned memory, which PyTorch keeps
    until they are copied.
    """
    own = torch.from_numpy(numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.int64))
    return own.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else own.to(device)


def across(numbers: Tensor, device: torch.device | None) -> Tensor:
    """The numbers on another device of the same kind, without a wait; where they are for None.

    Between CUDA devices PyTorch copies on the current stream of the numbers' device, behind an event of the other
    device's current stream, which waits for an event behind the copy. So it comes after what computes the numbers, and
    before whatever is launched to read them; the memory of both is theirs in the order of these streams too.
    """
    return numbers if device is None else numbers.to(device, non_blocking=True)


class Download:
    """Numbers on their way to the host, int64 [n], copied as they are now: behind what is launched so far."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers.to("cpu", non_blocking=True)  # from a CUDA device into pinned memory
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """The numbers; the host waits for them, and for nothing that was launched since."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers
