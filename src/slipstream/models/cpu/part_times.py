"""Where the time of a pass of the native kernels goes: by layer and part, work and waiting."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class PassPart(IntEnum):
    """The parts of a pass that are timed: `PassPart` of kernels/part_times.h."""

    EMBEDDING = 0
    NORM = 1
    ROUNDING = 2
    """Of rows, to what the weights are multiplied with."""
    QKV = 3
    ROTATION = 4
    """And storing keys and values."""
    ATTENTION = 5
    OUTPUT = 6
    GATE_UP = 7
    DOWN = 8
    EXPERTS = 9
    LAYER_INPUTS = 10
    HEAD = 11


class PartTimes:
    """What each thread takes in the passes of one model while it is given to them."""

    def __init__(self, num_threads: int, num_layers: int) -> None:
        self.nanoseconds: NDArray[np.int64] = np.zeros(
            (num_threads, num_layers + 1, len(PassPart), 2), dtype=np.int64
        )
        """[threads, layers and what is of no layer, parts, work and waiting], of the last pass."""

    @property
    def address(self) -> int:
        """Where the kernels write."""
        return int(self.nanoseconds.ctypes.data)

    def mean_s(self) -> NDArray[np.float64]:
        """Seconds [layers and what is of no layer, parts, work and waiting]: the threads' mean."""
        mean: NDArray[np.float64] = self.nanoseconds.mean(axis=0) / 1e9
        return mean
