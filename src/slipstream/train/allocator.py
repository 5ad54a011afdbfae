"""Keeps freed memory of large tensors for the next ones."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Tell glibc not to return freed memory to the system; does nothing with other C libraries.

    A training step allocates and frees the same large tensors every time. Fresh pages are zeroed and mapped one by one,
    which took 40 % of a step's time on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in musl
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
