"""One picture of the results: tokens a second of each peer, with and without the same draft model.

It reads on light and dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from benchmarks.peers.catalog import NAMES, OURS
from benchmarks.peers.figures import task_mean
from benchmarks.peers.report import ModelResults
from benchmarks.peers.results import Results
from benchmarks.peers.svg import framed

MODEL = "expanded-300m"
WEIGHTS = ("float32", "int8", "int4")
LEFT, WIDTH, RIGHT = 190, 460, 70
"""Pixels: for names, for the longest bar, for its number."""
TOP, ROW, BAR, GAP = 78, 46, 15, 16
"""Pixels: above the first row, a row, a bar, more between two weight formats."""

_STYLE = """\
    .page { fill: #ffffff; } text { fill: #24292f; font: 13px system-ui, sans-serif; }
    .title { font-size: 16px; font-weight: 600; } .small { font-size: 12px; fill: #57606a; } .ours { font-weight: 600; }
    .off { fill: #b6bec9; } .draft { fill: #7f9bbd; } .ours.off { fill: #8fb89a; } .ours.draft { fill: #1a7f37; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #e6edf3; } .small { fill: #9198a1; }
      .off { fill: #4b535d; } .draft { fill: #5b7ba3; } .ours.off { fill: #3c6b49; } .ours.draft { fill: #3fb950; }
    }"""


@dataclass(frozen=True)
class Row:
    """A peer at a weight format; tokens a second, None where a mode was not measured."""

    peer: str
    weights: str
    off: float | None
    draft: float | None

    @property
    def label(self) -> str:
        return f"{NAMES[self.peer]}, {self.weights}"

    @property
    def best(self) -> float:
        return max(self.off or 0.0, self.draft or 0.0)


def rows(model: ModelResults) -> list[Row]:
    """By weight format, the fastest first in each."""
    found = [
        Row(peer, weights, _speed(model, peer, "off", weights), _speed(model, peer, "draft", weights))
        for weights in WEIGHTS
        for peer in NAMES
    ]
    measured = [row for row in found if row.best > 0]
    return sorted(measured, key=lambda row: (row.weights != "float32", -row.best))


def _speed(model: ModelResults, peer: str, kind: str, weights: str) -> float | None:
    keys = model.keys(peer=peer, kind=kind, weights=weights)
    return max((task_mean(model.single[key]) for key in keys), default=None)


def picture(results: Results, name: str = MODEL) -> str:
    """The SVG for one model of the results."""
    model = ModelResults(results, name)
    drawn = rows(model)
    scale = WIDTH / max(row.best for row in drawn)
    parts: list[str] = []
    y = TOP
    for before, row in zip([None, *drawn], drawn, strict=False):
        if before is not None and (before.weights == "float32") != (row.weights == "float32"):
            y += GAP
        parts += _row(row, y, scale)
        y += ROW
    return framed(
        [*_legend(16, 62), *parts],
        results,
        title="Tokens a second on a CPU, one request",
        about=f"{model.title}; mean over tasks",
        style=_STYLE,
        width=LEFT + WIDTH + RIGHT,
        height=y + 8,
    )


def _legend(x: int, y: int) -> list[str]:
    return [
        f'  <rect class="off" x="{x}" y="{y - 9}" width="10" height="10"/>',
        f'  <text class="small" x="{x + 15}" y="{y}">without speculation</text>',
        f'  <rect class="draft" x="{x + 150}" y="{y - 9}" width="10" height="10"/>',
        f'  <text class="small" x="{x + 165}" y="{y}">with the same draft model, 4 tokens</text>',
    ]


def _row(row: Row, y: int, scale: float) -> list[str]:
    ours = "ours " if row.peer == OURS else ""
    bars = [(kind, value) for kind, value in (("off", row.off), ("draft", row.draft)) if value is not None]
    parts = [
        f'  <text class="{ours.strip() or "peer"}" x="{LEFT - 10}" y="{y + BAR + 5}" text-anchor="end">'
        f"{escape(row.label)}</text>"
    ]
    for number, (kind, value) in enumerate(bars):
        top, length = y + number * (BAR + 2), value * scale
        parts += [
            f'  <rect class="{ours}{kind}" x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}"/>',
            f'  <text x="{LEFT + length + 6:.1f}" y="{top + BAR - 3}">{value:.1f}</text>',
        ]
    return parts
