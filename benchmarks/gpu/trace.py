"""What a stretch of work asks of the device: kernels, copies, and the calls that wait for it."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import slipstream

PACKAGE = Path(slipstream.__file__).parent
NUM_SHOWN = 12


def profiled(work: Callable[[], None], num_steps: int) -> dict[str, Any]:
    """Device time, launches and copies of one of the `num_steps` steps that `work` makes, seen by PyTorch's profiler.

    Its times on the host are longer than without a profiler; those on the device are not.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize()
    device_us, kernels, copies, calls = 0.0, 0, Counter[str](), Counter[str]()
    by_kernel = Counter[str]()
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            took_us = float(event.time_range.elapsed_us())
            device_us += took_us
            if event.name.startswith(("Memcpy", "Memset")):
                copies[event.name] += 1
            else:
                kernels += 1
                by_kernel[event.name[:80]] += round(took_us)
        elif event.name.startswith("cuda") or event.name.startswith("cu"):
            calls[event.name] += 1
    operators = sorted(seen.key_averages(), key=lambda average: -average.self_cpu_time_total)

    def a_step(counts: Counter[str]) -> dict[str, float]:
        return {name: number / num_steps for name, number in counts.most_common(NUM_SHOWN)}

    return {
        "device_ms": device_us / num_steps / 1e3,
        "kernels": kernels / num_steps,
        "copies": a_step(copies),
        "runtime_calls": a_step(calls),
        "device_us_by_kernel": a_step(by_kernel),
        "host_us_by_operator": {
            average.key: average.self_cpu_time_total / num_steps for average in operators[:NUM_SHOWN]
        },
        "operator_calls": sum(a.count for a in operators if a.key.startswith("aten::")) / num_steps,
    }


def waits(work: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Line of the package to how often a step, of `num_steps` that `work` makes, it waits for the device."""
    found = Counter[str]()
    show = warnings.showwarning

    def note(message: Warning | str, *about: Any, **more: Any) -> None:
        if "synchroniz" in str(message):
            found[_line()] += 1
        else:
            show(message, *about, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
            warnings.showwarning = show
    return {line: number / num_steps for line, number in found.most_common()}


def _line() -> str:
    """The innermost line of the package that is being run, such as `models/rows.py:145 input_ids`."""
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno} {frame.name}"
    return "outside the package"
