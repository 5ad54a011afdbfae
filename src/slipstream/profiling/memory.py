"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch


def total_bytes(device: torch.device) -> int:
    """All memory of the device; on a CPU no more than the container's limit."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total)
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return int(total)


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU no more than the container's limit leaves."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (text := (group / "memory.max").read_text().strip()).isdigit():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(
            stat["inactive_file"]
        )  # file cache gives way
        available = min(available, max(0, int(text) - used))
    return int(available)
