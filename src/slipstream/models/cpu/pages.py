"""Pages of memory: large ones for weights, and giving back what is no longer read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SLICE_WEIGHTS = 2**22
"""How many weights are converted and packed at a time, where one layer has more."""


def moved(tensor: Tensor) -> Tensor:
    """A copy of a tensor [n, width], whose own pages are returned to the system as it is made."""
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    length = max(SLICE_WEIGHTS // tensor.shape[1], 1)
    for begin in range(0, len(tensor), length):
        part = tensor[begin : begin + length]
        copy[begin : begin + length] = part
        release(part)
    return copy


def huge_buffer(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in large pages where the system grants them. Weights are read from end to end."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, max(num_bytes, 1), **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def release(tensor: Tensor) -> None:
    """Return the pages of a tensor to the system. The tensor must not be read again.

    Weights that are mapped from their file stay in memory until the whole file is closed. Without this the packed
    weights would be held along with all the unpacked ones.
    """
    _drop(_pages(tensor))


def forget(tensor: Tensor) -> None:
    """Drop the pages of a tensor that is mapped from a file: when it is read again, they are read again.

    Nothing is done where one of its pages is not the file's any more (it was written to), or where the system does not
    tell.
    """
    pages = _pages(tensor)
    if not pages:
        return
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            entries = os.pread(file.fileno(), 8 * len(pages), 8 * (pages.start // mmap.PAGESIZE))
    except OSError:
        return
    flags = np.frombuffer(entries, dtype=np.uint64)
    is_there, is_swapped, is_of_a_file = ((flags >> np.uint64(bit)) & np.uint64(1) for bit in (63, 62, 61))
    if len(flags) == len(pages) and not (is_swapped | (is_there & ~is_of_a_file)).any():
        _drop(pages)


def free_numbers(module: nn.Module) -> None:
    """Give up a module's numbers; its tensors keep their shapes and types, on the meta device.

    `module.to_empty` does the same by a function that imports SymPy.
    """
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    )


def trim_heap() -> None:
    """Return the C library's freed memory to the system, where it can.

    Weights are stacked and converted before they are packed. What that takes is freed layer by layer, but glibc keeps
    it in pieces that the next layer does not fit into: 0.75 GB besides 1.2 GB of weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(c_size_t(0))


def _pages(tensor: Tensor) -> range:
    """The addresses of the whole pages that a tensor lies in: those at its edges may hold other data."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return range(0)
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return range(begin, max(begin, end), mmap.PAGESIZE)


def _drop(pages: range) -> None:
    if pages:
        size = pages.stop - pages.start
        ctypes.CDLL(None).madvise(c_void_p(pages.start), c_size_t(size), c_int(mmap.MADV_DONTNEED))
