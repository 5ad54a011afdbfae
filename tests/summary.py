"""What the end of a run of the tests says: why tests were skipped and how to have them, and how to repeat a failure."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REMEDIES = {
    "Chromium": "apt-get install chromium, or set SLIPSTREAM_CHROMIUM to the program of another",
    "playwright": "make install",
    "CUDA": "run the tests on a machine with an NVIDIA GPU",
    "Ray": "make install, on Linux with Python below 3.14",
    "extra `export`": "make install",
    "make models": "make models, where the package index can be reached",
    "sanitizers": "install the compiler's sanitizers (libasan and libubsan; with g++ they come along)",
    "compiler": "apt-get install g++",
    "kernels": "apt-get install g++",
    "g++": "apt-get install g++-aarch64-linux-gnu",
    "qemu": "apt-get install qemu-user",
    "curl": "apt-get install curl",
    "promtool": "install Prometheus, which has promtool",
    "vllm": "install vLLM in an environment of its own and put its command on the path",
}
"""Part of a reason to what makes the test run; the first that fits. Other reasons are of this system or processor."""
TOLD = ("SLIPSTREAM_CHROMIUM", "SLIPSTREAM_CPU_ISA", "CXX", "CI")
"""Variables that change what tests do: where they are set, the command that repeats a failure sets them too."""


def skips(reports: Iterable[Any]) -> Iterator[str]:
    """A line for each reason, with the number of tests and the remedy where there is one."""
    reasons = Counter(_reason(report) for report in reports)
    for reason, number in sorted(reasons.items()):
        remedy = next((told for part, told in REMEDIES.items() if part in reason), None)
        yield f"{number} skipped: {reason}" + (f"\n    to run them: {remedy}" if remedy else "")


def _reason(report: Any) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")


def repeats(reports: Iterable[Any], root: Path) -> Iterator[str]:
    """The command that repeats each failure alone, from the repository's root."""
    settings = " ".join(f"{name}={shlex.quote(os.environ[name])}" for name in TOLD if name in os.environ)
    python = Path(sys.executable)
    own = str(python.relative_to(root)) if python.is_relative_to(root) else str(python)
    for nodeid in dict.fromkeys(report.nodeid for report in reports):
        yield f"{settings} {shlex.quote(own)} -m pytest {shlex.quote(nodeid)}".strip()
