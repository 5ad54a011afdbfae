"""The device itself: what it is, and the two rates that bound every step."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

NUM_TIMED = 20
NUM_WARM_UP = 3


def description() -> dict[str, Any]:
    """Name, memory and versions."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def driver() -> str | None:
    """The driver's version; None where `nvidia-smi` does not tell it."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None


def rates() -> dict[str, Any]:
    """Medians: a copy from device memory to device memory, and a bfloat16 matrix product on random numbers."""
    num_bytes = min(2**32, torch.cuda.mem_get_info()[0] // 4)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    copy_s = median_s(partial(torch.empty_like(source).copy_, source))
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = median_s(lambda: left @ right)
    small = torch.zeros(1, device="cuda")
    launches = 1000
    return {
        "copied_bytes": num_bytes,
        "copy_gb_per_s": 2 * num_bytes / copy_s / 1e9,
        "matrix_size": size,
        "bfloat16_tflop_per_s": 2 * size**3 / product_s / 1e12,
        "launch_us": 1e6 * median_s(lambda: [small.add_(1) for _ in range(launches)]) / launches,
    }


def median_s(run: Callable[[], object]) -> float:
    """Median seconds of `run` on the device, between two CUDA events."""
    times_s: list[float] = []
    for number in range(NUM_WARM_UP + NUM_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= NUM_WARM_UP:
            times_s.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times_s)
