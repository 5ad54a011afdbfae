"""What else the machine does, and how fast it reads memory."""

from __future__ import annotations

import os
import time

import psutil
import torch

BUSY_SHARE = 0.10
"""Processor time of others, in cores, above which the machine does not count as idle."""


def busy_cpu_s() -> float:
    """Processor time that was not idle since the machine started, the host's included, over all cores."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice)


def others_share(seconds: float = 2.0) -> float:
    """Cores that are in use while this process sleeps."""
    before_s, started_s = busy_cpu_s(), time.perf_counter()
    time.sleep(seconds)
    return (busy_cpu_s() - before_s) / (time.perf_counter() - started_s)


def load_average() -> float:
    return os.getloadavg()[0]


def read_bandwidth_bytes_per_s(threads: int) -> float:
    """Best of seven sums over 512 MiB: what the roofline of a decoding step is computed with."""
    values = torch.ones(2**27, dtype=torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best_s = float("inf")
        for _ in range(7):
            started_s = time.perf_counter()
            values.sum()
            best_s = min(best_s, time.perf_counter() - started_s)
    finally:
        torch.set_num_threads(before)
    return values.numel() * 4 / best_s
