"""Draws `docs/images/rooms.svg`: the rooms of the package in their layers, and what imports what.

`python docs/draw_rooms.py`; `make docs` runs it too. Layers are those of the import contract in `pyproject.toml`,
imports those of the code (without those for type checking). An import that follows from a chain of others is left out.
The same code gives the same file, byte for byte, and a test compares it with the committed one.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "slipstream"
PICTURE = ROOT / "docs/images/rooms.svg"
TITLE = "The rooms of Slipstream: imports run downward only"
CAPTION = "An arrow means: imports. What follows from a chain of arrows is left out."

BOX_WIDTH, BOX_HEIGHT, ROW, LANE, GAP = 104, 26, 52, 18, 14
"""Pixels: of a box; from row to row; for a line that passes a row; between neighbours."""
MARGIN, TOP = 24, 66
SWEEPS = 24
"""Passes over the rows that put neighbours near each other."""

_STYLE = """\
    .page { fill: #ffffff; } text { fill: #24292f; font: 13px system-ui, sans-serif; text-anchor: middle; }
    .title { font-size: 16px; font-weight: 600; text-anchor: start; } .small { font-size: 12px; text-anchor: start; }
    .room { fill: #ddf4ff; stroke: #54aeff; } .edge { fill: none; stroke: #8c959f; stroke-width: 1.2; }
    .head { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #e6edf3; }
      .room { fill: #121d2f; stroke: #388bfd; } .edge { stroke: #6e7681; } .head { fill: #6e7681; }
    }"""

Edges = dict[str, set[str]]


@dataclass
class Place:
    """A room, or a line on its way through a row (`name` is then empty)."""

    name: str
    row: int
    x: float = 0.0

    @property
    def width(self) -> int:
        return BOX_WIDTH if self.name else LANE

    @property
    def y(self) -> float:
        return TOP + self.row * ROW + BOX_HEIGHT / 2


def layers() -> list[list[str]]:
    """Rooms by layer, the highest first; the rooms that the contract leaves out come on top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [contract] = [one for one in settings["contracts"] if one.get("containers") == [PACKAGE]]
    found = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    found[0] += contract.get("exhaustive_ignores", [])
    return found


def imports() -> Edges:
    """Each room to the rooms that it imports from."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    for table in ("assets.embedded", "draft.methods"):  # tables that any room may read
        graph.remove_module(f"{PACKAGE}.{table}")
    rooms = sorted(graph.find_children(PACKAGE))
    return {
        _name(one): {
            _name(other)
            for other in rooms
            if one != other and graph.direct_import_exists(importer=one, imported=other, as_packages=True)
        }
        for one in rooms
    }


def _name(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def reduced(edges: Edges) -> Edges:
    """Without the edges that follow from others."""
    reached: Edges = {}

    def reach(room: str) -> set[str]:
        if room not in reached:
            reached[room] = set().union(*({other} | reach(other) for other in edges[room]))
        return reached[room]

    return {
        room: {one for one in others if not any(one in reach(other) for other in others - {one})}
        for room, others in edges.items()
    }


def placed(rows: Sequence[Sequence[str]], edges: Edges) -> tuple[list[list[Place]], list[list[Place]]]:
    """The places row by row, and each edge as the places that it passes, its ends included."""
    places = {name: Place(name, number) for number, row in enumerate(rows) for name in row}
    grid = [[places[name] for name in row] for row in rows]
    paths = []
    for room in sorted(edges):
        for other in sorted(edges[room]):
            between = range(places[room].row + 1, places[other].row)
            lanes = [Place("", row) for row in between]
            for lane in lanes:
                grid[lane.row].append(lane)
            paths.append([places[room], *lanes, places[other]])
    neighbours: dict[int, list[Place]] = {}
    for path in paths:
        for upper, lower in pairwise(path):
            neighbours.setdefault(id(upper), []).append(lower)
            neighbours.setdefault(id(lower), []).append(upper)
    for row in grid:
        _spread(row)
    for sweep in range(SWEEPS):
        for row in grid if sweep % 2 == 0 else reversed(grid):
            wished = {id(place): _mean_x(neighbours.get(id(place), [place])) for place in row}
            row.sort(key=lambda place: wished[id(place)])
            _spread(row, wished)
    left = min(place.x - place.width / 2 for row in grid for place in row)
    for row in grid:
        for place in row:
            place.x += MARGIN - left
    return grid, paths


def _mean_x(places: Sequence[Place]) -> float:
    return sum(place.x for place in places) / len(places)


def _spread(row: Sequence[Place], wished: Mapping[int, float] | None = None) -> None:
    """Put a row's places side by side in their order, as near to what they wish as that allows."""
    at = 0.0
    for place in row:
        want = at + place.width / 2 if wished is None else wished[id(place)]
        place.x = max(at + place.width / 2, want) if place is not row[0] else want
        at = place.x + place.width / 2 + GAP
    if wished is not None and row:  # pushed to the right on the way: half of that back
        shift = _mean_x(row) - sum(wished[id(place)] for place in row) / len(row)
        for place in row:
            place.x -= shift


def purpose(room: str) -> str:
    """The first line of the room's docstring."""
    folder = ROOT / "src" / PACKAGE
    file = folder / room / "__init__.py" if (folder / room).is_dir() else folder / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def picture() -> str:
    """The SVG."""
    grid, paths = placed(layers(), reduced(imports()))
    width = round(max(place.x + place.width / 2 for row in grid for place in row) + MARGIN)
    height = TOP + len(grid) * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(TITLE)}">',
        f"  <style>\n{_STYLE}\n  </style>",
        '  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker>',
        f'  <rect class="page" width="{width}" height="{height}" rx="6"/>',
        f'  <text class="title" x="{MARGIN}" y="28">{escape(TITLE)}</text>',
        f'  <text class="small" x="{MARGIN}" y="47">{escape(CAPTION)}</text>',
    ]
    lines += [_edge(path) for path in paths]
    for row in grid:
        for place in sorted(row, key=lambda place: place.name):
            if place.name:
                lines += _box(place)
    return "\n".join([*lines, "</svg>", ""])


def _edge(path: Sequence[Place]) -> str:
    """A line from the lower side of the first place to the upper side of the last."""
    half = BOX_HEIGHT / 2
    parts = [f"M{path[0].x:.0f} {path[0].y + half:.0f}"]
    x, y = path[0].x, path[0].y + half
    for place in path[1:]:
        top, bottom = place.y - half, place.y + half
        middle = (y + top) / 2
        parts.append(f"C{x:.0f} {middle:.0f} {place.x:.0f} {middle:.0f} {place.x:.0f} {top:.0f}")
        if not place.name:
            parts.append(f"L{place.x:.0f} {bottom:.0f}")
        x, y = place.x, bottom
    names = f"{path[0].name} {path[-1].name}"
    return f'  <path class="edge" data-import="{names}" marker-end="url(#head)" d="{" ".join(parts)}"/>'


def _box(place: Place) -> list[str]:
    left, top = place.x - BOX_WIDTH / 2, place.y - BOX_HEIGHT / 2
    about = escape(purpose(place.name))
    return [
        f'  <g><title>{about}</title><rect class="room" x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}"'
        f' height="{BOX_HEIGHT}" rx="4"/><text x="{place.x:.0f}" y="{place.y + 4:.0f}">{escape(place.name)}</text></g>'
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
