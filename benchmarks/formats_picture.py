"""Draws speed against quality of the weight formats, from what two other benchmarks wrote.

    python -m benchmarks.formats_picture

Quality: docs/benchmarks/quantization.json (`benchmarks.quantization`), conversations alone, a float32 cache where one
was measured. Speed: docs/benchmarks/context_cost.json (`benchmarks.step_cost --contexts`), one row at the shortest
context. Formats that only one of them has are left out. Writes docs/benchmarks/formats.svg.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS
from benchmarks.harness.pictures import drawing

CALIBRATED = " calibrated"
STORED = "bfloat16"
"""What checkpoints hold: kept so, nothing is rounded, and nothing lost."""


@dataclass(frozen=True)
class Point:
    """One weight format."""

    name: str
    step_ms: float
    lost: float
    """Perplexity over float32's, in percent."""


def points(quality: dict[str, Any], speed: dict[str, Any]) -> list[Point]:
    """The formats that both have, fastest first. A calibrated format's pass is that of the same format."""
    shortest = min(row["context"] for row in speed["rows"])
    times = {row["weights"]: row["step_ms"] for row in speed["rows"] if row["context"] == shortest}
    caches = {row["cache"] for row in quality["rows"]}
    cache = "float32" if "float32" in caches else min(caches)
    found = [
        Point(
            row["weights"],
            times[row["weights"].removesuffix(CALIBRATED)],
            100 * (row["conversations"]["ratio"] - 1),
        )
        for row in quality["rows"]
        if row["cache"] == cache and row["weights"].removesuffix(CALIBRATED) in times
    ]
    if STORED in times and STORED not in {point.name for point in found}:
        found.append(Point(f"{STORED}, as stored", times[STORED], 0.0))
    return sorted(dict.fromkeys(found), key=lambda point: (point.step_ms, point.lost))


def draw(found: list[Point], model: str, file: Path) -> None:
    """A point a format; down and left is better."""
    with drawing(file, 6.4, 3.6) as figure:
        axes = figure.subplots()
        for point in found:
            calibrated = point.name.endswith(CALIBRATED)
            axes.plot(point.step_ms, point.lost, "o", color="#1a7f37" if calibrated else "#57606a")
            axes.annotate(
                point.name, (point.step_ms, point.lost), xytext=(6, 4), textcoords="offset points", fontsize=9
            )
        axes.set_xlabel(f"ms a token, one row ({model})")
        axes.set_ylabel("perplexity over float32 (%)")
        axes.set_xlim(left=0)
        axes.margins(x=0.2, y=0.15)
        axes.grid(alpha=0.3)


def main() -> int:
    files = [DOCS / "quantization.json", DOCS / "context_cost.json"]
    if missing := [file.name for file in files if not file.is_file()]:
        print(f"error: there is no {missing[0]}; run its benchmark first", file=sys.stderr)
        return 2
    quality, speed = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    found = points(quality, speed)
    draw(found, speed["rows"][0]["model"], DOCS / "formats.svg")
    for point in found:
        print(f"{point.name}: {point.step_ms:.2f} ms, {point.lost:+.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
