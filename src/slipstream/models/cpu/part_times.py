"""Where the time of a pass of the native kernels goes: by layer and part, work and waiting."""

from __future__ import annotations

from enum import IntEnum


class PassPart(IntEnum):
    """The parts of a pass that are timed: `PassPart` of part_times.h."""

    EMBEDDING = 0
    NORM = 1
    ROUNDING = 2
    QKV = 3
    ROTATION = 4
    ATTENTION = 5
    OUTPUT = 6
    GATE_UP = 7
    DOWN = 8
    EXPERTS = 9
    LAYER_INPUTS = 10
    HEAD = 11
