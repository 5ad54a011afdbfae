"""Plots as SVG text that takes its colours and fonts from the page around it.

matplotlib does not support CSS variables, so it draws with placeholder colours that are replaced afterwards: one
drawing serves dark and light pages.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from slipstream.tools.bench.statistics import Interval

NUM_SERIES = 8
"""Colours that the page defines as --series-1 and so on; further series reuse them with another marker."""

_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_PARTS = ("#060101", "#060102", "#060103")
_VARIABLES = (
    {_INK: "ink", _MUTED: "muted", _GRID: "line"}
    | {f"#0501{number:02x}": f"series-{number}" for number in range(NUM_SERIES + 1)}
    | {color: f"part-{number}" for number, color in enumerate(_PARTS, start=1)}
)
"""Placeholder colour to the page's CSS variable."""
_MARKERS = "osD^v"
_WIDTH_IN = 4.7
"""Inches, 72 points each: a phone shows it at about its own size."""

_STYLE: Any = {  # matplotlib's own type names every parameter there is
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval, if there is one."""

    value: float
    interval: Interval | None = None


def series_variable(number: int) -> str:
    """CSS variable of the colour of series `number`; 0 is speculation off, which is grey."""
    return f"series-{0 if number == 0 else (number - 1) % NUM_SERIES + 1}"


def part_variable(number: int) -> str:
    """CSS variable of the colour of part `number` of a stack, from 0."""
    return _VARIABLES[_PARTS[number]]


def marker(number: int) -> str:
    """The marker of series `number`, which separates series of the same colour."""
    return _MARKERS[max(number - 1, 0) // NUM_SERIES % len(_MARKERS)]


def estimates(rows: Mapping[str, Mapping[int, Estimate]], axis: str, reference: float | None) -> str:
    """SVG of named rows of points with their intervals, one colour a series, and a line at `reference`."""
    series = sorted({number for row in rows.values() for number in row})
    height = 0.75 + len(rows) * (0.18 + 0.13 * len(series))
    with _axes(height) as (figure, axes):
        axes.grid(axis="y", visible=False)
        if reference is not None:
            axes.axvline(reference, color=_MUTED, linewidth=1)
        for place, row in enumerate(rows.values()):
            for index, number in enumerate(series):
                if number in row:
                    offset = 0.62 * ((index + 0.5) / len(series) - 0.5)
                    _point(axes, row[number], place + offset, number)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlabel(axis)
        return _svg(figure, "estimates")


def lines(
    series: Mapping[int, Mapping[float, float]],
    axis_x: str,
    axis_y: str,
    top: float | None = None,
    logarithmic: bool = False,
) -> str:
    """SVG with one line a series, x to y; y from 0 to `top`."""
    with _axes(2.9) as (figure, axes):
        for number, points in series.items():
            places = sorted(points)
            values = [points[place] for place in places]
            axes.plot(
                places,
                values,
                color=_stand_in(series_variable(number)),
                marker=marker(number),
                zorder=3 + number,
            )
        places = sorted({place for points in series.values() for place in points})
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        step = -(-len(places) // 12)
        axes.set_xticks(places[::step], [f"{place:g}" for place in places[::step]])
        axes.set_ylim(0, top)
        axes.set_xlabel(axis_x)
        axes.set_ylabel(axis_y)
        return _svg(figure, f"lines-{re.sub('[^a-z]+', '-', axis_y.lower())}")


def stacks(rows: Mapping[str, Seq[float]], axis: str) -> str:
    """SVG of stacked horizontal bars of at most three parts."""
    names = [textwrap.fill(name, 18) for name in rows]
    num_lines = sum(1 + name.count("\n") for name in names)
    with _axes(0.75 + 0.2 * len(rows) + 0.14 * num_lines) as (figure, axes):
        axes.grid(axis="y", visible=False)
        for place, parts in enumerate(rows.values()):
            start = 0.0
            for part, length in enumerate(parts):
                axes.barh(place, length, left=start, height=0.6, color=_PARTS[part])
                start += length
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(axis)
        return _svg(figure, "stacks")


def _stand_in(variable: str) -> str:
    return next(color for color, name in _VARIABLES.items() if name == variable)


def _point(axes: Axes, estimate: Estimate, place: float, number: int) -> None:
    color = _stand_in(series_variable(number))
    if estimate.interval is not None:
        axes.plot([estimate.interval.low, estimate.interval.high], [place, place], color=color, linewidth=1.4)
    axes.plot([estimate.value], [place], color=color, marker=marker(number), linestyle="none", zorder=3)


class _axes:
    """A figure with one pair of axes, drawn in the page's style."""

    def __init__(self, height_in: float) -> None:
        self._height_in = height_in
        self._style = matplotlib.rc_context(_STYLE)

    def __enter__(self) -> tuple[Figure, Axes]:
        self._style.__enter__()
        figure = Figure(figsize=(_WIDTH_IN, self._height_in), layout="constrained")
        return figure, figure.add_subplot()

    def __exit__(self, *exception: Any) -> None:
        self._style.__exit__(*exception)


def _svg(figure: Figure, name: str) -> str:
    """The drawing as an SVG element without header and size, with ids that are unique on the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|xlink:href="#|href="#)', rf"\1{name}-", text).replace("xlink:href", "href")
    return re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", text).strip()
