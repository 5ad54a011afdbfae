"""Memory that large tensors leave is kept for the next ones."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back to the system; does nothing elsewhere.

    A training step makes and drops the same large tensors every time. Pages that come fresh from the system are zeroed
    and mapped one by one, which took 40 % of a step's time on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
