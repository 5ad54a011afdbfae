"""One picture of the runs with prompts of given lengths: ms a token over the prompt's length, by engine and bits.

It reads on light and dark pages.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from html import escape

from benchmarks.peers.catalog import NAMES, OURS
from benchmarks.peers.cells import Cells, Side, condition_of, decode_rate, length_of, step_ms
from benchmarks.peers.results import Results
from benchmarks.peers.svg import framed

PREFERRED = "expanded-300m"
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
LEFT, WIDTH, RIGHT = 60, 420, 230
TOP, HEIGHT, BOTTOM = 66, 300, 44
"""Pixels: around and inside the axes."""
LABEL = 17
"""Pixels between two labels at the least."""

_STYLE = """\
    .page { fill: #ffffff; } text { fill: #24292f; font: 13px system-ui, sans-serif; }
    .title { font-size: 16px; font-weight: 600; } .small { font-size: 12px; fill: #57606a; }
    .grid { stroke: #d8dee4; } polyline, .leader { fill: none; stroke-width: 2; } .leader { stroke-width: 1; }
    .slipstream { stroke: #1a7f37; } .openvino { stroke: #7f9bbd; } .llamacpp { stroke: #c08a4b; }
    .vllm { stroke: #a37fbd; } .transformers { stroke: #b6bec9; }
    .bfloat16 { stroke-dasharray: 9 4; } .int8 { stroke-dasharray: 5 3; } .int4 { stroke-dasharray: 2 3; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #e6edf3; } .small { fill: #9198a1; } .grid { stroke: #30363d; }
      .slipstream { stroke: #3fb950; }
    }"""


@dataclass(frozen=True)
class Line:
    """One engine at one weight format, without speculation."""

    peer: str
    precision: str
    name: str
    points: tuple[tuple[int, float], ...]
    """Prompt tokens and median ms a token, ascending."""


def lines(cells: Cells) -> list[Line]:
    """At each length a peer's fastest mode without speculation; peers with one length alone are left out."""
    tasks = [task for task in cells.tasks if not condition_of(task)]
    found = []
    for precision in PRECISIONS:
        for peer in NAMES:
            side = Side(peer == OURS, precision, peers=(peer,))
            modes = [(task, cells.fastest(side, task, decode_rate)) for task in tasks]
            points = [
                (length_of(task), statistics.median(cells.values(task, mode, step_ms)))
                for task, mode in modes
                if mode is not None
            ]
            if len(points) > 1:
                weights = {cells.definition(mode)["weights"] for _, mode in modes if mode is not None}
                found.append(
                    Line(peer, precision, f"{NAMES[peer]}, {'/'.join(sorted(weights))}", tuple(points))
                )
    return found


def picture(results: Results) -> str | None:
    """The SVG of one model, or None where none was measured at two lengths."""
    names = [name for name in results.settings["models"] if name in results.models]
    names.sort(key=lambda name: name != PREFERRED)
    for name in names:
        cells = Cells(results, name)
        if drawn := lines(cells):
            return _drawing(results, cells, drawn)
    return None


def _drawing(results: Results, cells: Cells, drawn: list[Line]) -> str:
    lengths = sorted({length for line in drawn for length, _ in line.points})
    top_ms = _round_up(max(ms for line in drawn for _, ms in line.points))
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])

    def place(length: int, ms: float) -> tuple[float, float]:
        x = LEFT + WIDTH * (math.log2(length) - first) / (last - first)
        return x, TOP + HEIGHT * (1 - ms / top_ms)

    parts = []
    for step in range(5):
        ms = top_ms * step / 4
        y = place(lengths[0], ms)[1]
        parts += [
            f'  <line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}"/>',
            f'  <text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ms:g}</text>',
        ]
    for length in lengths:
        x = place(length, 0)[0]
        parts.append(
            f'  <text class="small" x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{length:,}</text>'
        )
    parts.append(f'  <text class="small" x="{LEFT}" y="{TOP + HEIGHT + 36}">prompt tokens</text>')
    label_y = 0.0
    for line in sorted(drawn, key=lambda line: -line.points[-1][1]):
        points = [place(*point) for point in line.points]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end_x, end_y = points[-1]
        label_y = max(label_y + LABEL, end_y)
        x = LEFT + WIDTH + 24
        kind = f"{line.peer} {line.precision}"
        parts += [
            f'  <polyline class="{kind}" points="{text}"/>',
            f'  <line class="leader {kind}" x1="{end_x + 3:.1f}" y1="{end_y:.1f}" x2="{x - 4}" y2="{label_y:.1f}"/>',
            f'  <text x="{x}" y="{label_y + 4:.1f}">{escape(line.name)}: {line.points[-1][1]:.0f}</text>',
        ]
    return framed(
        parts,
        results,
        title="Milliseconds a token behind a prompt, without speculation",
        about=cells.title,
        style=_STYLE,
        width=LEFT + WIDTH + RIGHT,
        height=max(TOP + HEIGHT + BOTTOM, round(label_y) + 20),
    )


def _round_up(value: float) -> float:
    """To 1, 2, 4 or 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 8, 10) if factor * power >= value)
