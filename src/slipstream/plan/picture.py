"""A picture of where the bytes go."""

from __future__ import annotations

from pathlib import Path

from slipstream.plan.deployment import PartKind
from slipstream.plan.report import FitReport
from slipstream.plan.sizes import format_bytes

_COLOURS = {
    PartKind.TARGET: "#1b6ca8",
    PartKind.DRAFTER: "#8a5fbf",
    PartKind.CACHE: "#3b8e5a",
    PartKind.PASS: "#b8860b",
    PartKind.PROCESS: "#7f8790",
}


def draw(report: FitReport, file: Path) -> None:
    """Draw a bar for every part, the largest first, below one of the whole with the memory that there is."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    plan = report.plan
    parts = sorted((part for part in plan.parts if part.num_bytes), key=lambda part: -part.num_bytes)
    figure = Figure(figsize=(8, 1.6 + 0.32 * (len(parts) + 2)), layout="constrained")
    axes = figure.subplots()
    unit = 2**30 if report.memory_bytes >= 2**31 else 2**20
    left = 0.0
    for kind in PartKind:
        width = plan.of_kind(kind) / unit
        axes.barh(0, width, left=left, color=_COLOURS[kind])
        left += width
    axes.barh(1, plan.loading_bytes / unit, color="0.75")
    names = ["all, while requests run", "at most, while it starts"]
    for place, part in enumerate(parts, start=2):
        axes.barh(place, part.num_bytes / unit, color=_COLOURS[part.kind])
        axes.text(
            part.num_bytes / unit, place, f" {format_bytes(part.num_bytes)}", va="center", fontsize="small"
        )
        names.append(part.name)
    axes.axvline(report.memory_bytes / unit, color="#d1495b", linestyle="--")
    axes.text(report.memory_bytes / unit, -0.62, "memory ", color="#d1495b", ha="right", fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(report.memory_bytes, plan.peak_bytes) / unit)
    axes.set_xlabel("GiB" if unit == 2**30 else "MiB")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{report.model}: {plan.batch:,} at once, {plan.context:,} tokens each", fontsize="medium")
    axes.legend(
        [Patch(color=colour) for colour in _COLOURS.values()],
        [str(kind) for kind in _COLOURS],
        fontsize="small",
    )
    figure.savefig(file)
