"""Which of PyTorch's attention kernels run on a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.backends import cuda

_lock = threading.Lock()
_num_inside = 0
"""Bodies of `without_cudnn` that run now, in any thread."""
_before = True
"""Whether cuDNN's attention was allowed when the first of them began."""


@contextlib.contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Leave cuDNN's attention out within the body; nothing changes for a CPU.

    It plans anew for every shape that it meets first. A text grows by a token a step, so most steps of a young process
    meet one: on an H100 (PyTorch 2.11) a step of 5 ms took 43.

    PyTorch has one switch for the process. It is put back when the last of the bodies that run in several threads ends.
    """
    global _num_inside, _before
    if device.type == "cpu":
        yield
        return
    with _lock:
        if not _num_inside:
            _before = bool(cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            cuda.enable_cudnn_sdp(False)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                cuda.enable_cudnn_sdp(_before)
