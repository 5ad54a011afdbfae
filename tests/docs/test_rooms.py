"""The picture of the rooms is that of the code's imports."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/draw_rooms.py"))


def test_the_picture_is_current(drawing: dict[str, Any]) -> None:
    committed = (ROOT / "docs/images/rooms.svg").read_text(encoding="utf-8")
    assert committed == drawing["picture"](), "docs/images/rooms.svg: run `make docs`"


def test_it_has_every_room_in_its_layer_and_every_import_runs_down(drawing: dict[str, Any]) -> None:
    svg = drawing["picture"]()
    height = {
        name: int(y)
        for y, name in re.findall(r'<rect class="room" x="\d+" y="(\d+)"[^<]*/><text[^>]*>(\w+)<', svg)
    }
    package = ROOT / "src/slipstream"
    rooms = {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(height) == rooms - {"__init__"}
    for layer in drawing["layers"]():
        assert len({height[room] for room in layer}) == 1
    drawn = re.findall(r'data-import="(\w+) (\w+)"', svg)
    assert all(height[room] < height[other] for room, other in drawn)
    below: dict[str, set[str]] = {room: set() for room in height}
    for room, other in sorted(drawn, key=lambda edge: -height[edge[0]]):
        below[room] |= {other} | below[other]
    imports = drawing["imports"]()
    assert {
        room: others | set().union(*(below[one] for one in others)) for room, others in imports.items()
    } == below


def test_what_follows_from_others_is_left_out(drawing: dict[str, Any]) -> None:
    edges = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert drawing["reduced"](edges) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for type checking are among those that count."""
    graph = grimp.build_graph("slipstream", exclude_type_checking_imports=False, cache_dir=None)
    waiting = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    while ready := {module for module, others in waiting.items() if not others & waiting.keys()}:
        waiting = {module: others for module, others in waiting.items() if module not in ready}
    assert {module: sorted(others & waiting.keys()) for module, others in waiting.items()} == {}
