"""Where a step's time goes on a CPU: the parts of the native kernels' passes, beside what reading their bytes takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.errors import ConfigError
from slipstream.models import CausalLM
from slipstream.models.cpu import threads
from slipstream.models.cpu.part_times import PassPart
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.profiling.pass_times import PassBench, cache_bytes_by_layer

ROWS = (1, 5, 8)
"""A plain step, and checks of chains of 4 and 7."""
REPEATS = 30


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of a pass: the threads' means, as medians over passes."""

    name: str
    work_s: float
    waiting_s: float
    """At the end of its operations, until all of their parts were done."""
    bytes_read: int
    """Its weights, or the keys and values that it attends to; 0 where it reads neither."""
    layers_s: tuple[float, ...]
    """The work of each layer; empty for a part of no layer."""

    def roofline_s(self, bytes_per_s: float) -> float:
        """Seconds that reading its bytes takes at this rate."""
        return self.bytes_read / bytes_per_s


@dataclass(frozen=True, slots=True)
class PartProfile:
    """A pass of `rows` rows behind `context` tokens."""

    rows: int
    context: int
    pass_s: float
    """Of a pass whose parts are timed."""
    parts: tuple[PartTime, ...]

    @property
    def rest_s(self) -> float:
        """What is outside the kernels' threads: Python, calls, waking them up."""
        return self.pass_s - sum(part.work_s + part.waiting_s for part in self.parts)


def check_parts(model: CausalLM) -> None:
    """Raise `ConfigError` unless the native kernels compute the model's whole passes."""
    if not isinstance(model.executor, CpuKernels):
        raise ConfigError(
            f"--by-part times whole passes of the native CPU kernels, and this model runs as {model.runs_as}; omit it"
        )


def measure_parts(
    model: CausalLM, context: int, on_progress: Callable[[int, int], None]
) -> list[PartProfile]:
    """The parts of passes of each of `ROWS`, in turns; `model` is one that `check_parts` takes."""
    executor = model.executor
    assert isinstance(executor, CpuKernels)
    context = max(min(context, model.context_length - max(ROWS)), 1)
    with threads.limit(model.num_threads):
        bench = PassBench(model, ROWS, (context,), seed=0)
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        taken: dict[int, list[np.ndarray]] = {rows: [] for rows in ROWS}
        for repeat in range(REPEATS):
            for rows in ROWS:
                on_progress(repeat * len(ROWS) + ROWS.index(rows), REPEATS * len(ROWS))
                bench.pass_s(rows, context)  # not timed: few rows follow many
                with executor.timing_parts() as parts:
                    times[rows].append(bench.pass_s(rows, context))
                taken[rows].append(parts.mean_s())
    on_progress(REPEATS * len(ROWS), REPEATS * len(ROWS))
    return [
        PartProfile(
            rows,
            context,
            statistics.median(times[rows]),
            _parts(executor, np.median(taken[rows], axis=0), cache_bytes_by_layer(model, rows, context)),
        )
        for rows in ROWS
    ]


def _parts(executor: CpuKernels, seconds: np.ndarray, cache_bytes: list[int]) -> tuple[PartTime, ...]:
    """Those that take any time; `seconds` as of `PartTimes.mean_s`."""
    weights = executor.bytes_by_part()
    found = []
    for part in PassPart:
        work, waiting = seconds[:, part, 0], seconds[:, part, 1]
        if not work.any():
            continue
        read = sum(cache_bytes) if part is PassPart.ATTENTION else weights.get(part, 0)
        layers = tuple(work[:-1].tolist()) if work[:-1].any() else ()
        found.append(PartTime(part.name.lower(), float(work.sum()), float(waiting.sum()), read, layers))
    return tuple(found)
