"""Part `tests`: tests/gpu, and how many passed."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.suite import run_tests

END_S = 6.0
"""How long pytest has to write its report once it is interrupted."""


def measure(part: Part) -> None:
    """See the module. On a CPU the tests are collected and skipped."""
    part.cell("tests", partial(run_tests, max(part.left_s - END_S, 1.0)), needs_s=10)
