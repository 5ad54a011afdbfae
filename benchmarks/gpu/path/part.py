"""One part in a process of its own: `python -m benchmarks.gpu.path.part NAME --output FOLDER --until TIME`.

A part is the module of this package with its name: `measure(part)` fills cells. Each cell is kept on disk as it ends,
so that a part that is stopped goes on where it was. A cell that fails, or for which no time is left, is missing: the
others are measured all the same, and the next call tries it again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import driver
from benchmarks.harness.command import ROOT
from benchmarks.harness.kept import Kept, say

INCOMPLETE = 3
"""The exit status of a part of which cells are missing."""
MISSING = "missing"
"""The cell of an unfinished part that says which cells are missing, and why."""
MOST_SHOWN = 400


def settings_of(device: str) -> dict[str, Any]:
    """What a part's cells depend on, beside the code."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


class Part:
    """What a part is given: where it runs, how long it may take, and where its cells go."""

    def __init__(self, file: Path, device: str, until_s: float) -> None:
        self.device = torch.device(device)
        self.settings = settings_of(device)
        about: dict[str, Any] = {"driver": driver(), "cuda": torch.version.cuda} if device == "cuda" else {}
        self.kept = Kept(file, self.settings, **about)
        self.name = file.stem
        self.until_s = until_s
        self.cells: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are those of a trial on a CPU."""
        return self.device.type == "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until the part must have ended."""
        return self.until_s - time.time()

    def cell(self, name: str, measure: Callable[[], Any], needs_s: float = 1.0) -> Any:
        """What `measure` returns, or a run before has kept; None where it fails or `needs_s` are not left."""
        if not self.kept.has(name) and self.left_s < needs_s:
            self.without(
                name, f"no time: it needs some {needs_s:.0f} s, {max(self.left_s, 0):.0f} s are left"
            )
            return None
        try:
            value = self.kept.cell(name, measure)
        except Exception as error:
            traceback.print_exc()
            self.without(name, f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000])
            return None
        say(f"  {json.dumps(value, ensure_ascii=False)[:MOST_SHOWN]}")
        self.cells[name] = value
        return value

    def without(self, name: str, reason: str) -> None:
        """A cell that is missing, and why."""
        say(f"{name}: missing, {reason}")
        self.missing[name] = reason
        self.kept.put(MISSING, self.missing)

    def finish(self) -> int:
        """Write the result where nothing is missing; returns the exit status."""
        if self.missing:
            return INCOMPLETE
        self.kept.finish({"settings": self.settings, "cells": self.cells})
        return 0


def mend_interpreter() -> None:
    """As tests do: Triton's interpreter has faults."""
    sys.path.append(str(ROOT / "tests/cuda"))
    importlib.import_module("interpreter").mend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        mend_interpreter()
    part = Part(options.output / f"{options.name}.json", options.device, options.until)
    if part.kept.has(MISSING):
        part.kept.put(MISSING, {})
    importlib.import_module(f"benchmarks.gpu.path.{options.name}").measure(part)
    sys.exit(part.finish())


if __name__ == "__main__":
    main()
