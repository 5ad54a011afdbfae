"""Times on the device, inside a CUDA graph, so that launches from Python do not count. On a CPU: of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

NUM_TIMED = 15
NUM_WARM_UP = 3
LEAST_US = 2000.0
"""A replay that is shorter is repeated until a sample takes so long."""


def graph_us(call: Callable[[], object], device: torch.device) -> float:
    """Median microseconds of what `call` launches, recorded once and replayed."""
    if device.type != "cuda":
        return wall_ms(call, 1, 0)["ms"] * 1e3
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    once_us = _event_us(graph.replay, 1)
    replays = max(1, min(200, round(LEAST_US / max(once_us, 0.1))))
    for _ in range(NUM_WARM_UP):
        graph.replay()
    return statistics.median(_event_us(graph.replay, replays) for _ in range(NUM_TIMED))


def _event_us(call: Callable[[], object], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def wall_ms(call: Callable[[], object], number: int, warm_up: int = NUM_WARM_UP) -> dict[str, Any]:
    """Median and quartiles of a call's milliseconds on the host's clock; the call itself waits for the device."""
    times = []
    for turn in range(warm_up + number):
        started_s = time.perf_counter()
        call()
        if turn >= warm_up:
            times.append((time.perf_counter() - started_s) * 1e3)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"ms": statistics.median(times), "quartiles_ms": quartiles}
