"""The processor: its name, its cores, its caches."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE_BYTES = 32 * 2**20
"""Assumed where the system does not say how large the last-level cache is."""


def cpu_name() -> str:
    """The processor's name as its maker writes it, else the architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def num_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first processor."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[:-1].isdigit() and size[-1] in units]
    return max(known, default=_USUAL_CACHE_BYTES)
