"""A class name stands for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "src" / "slipstream"


def places() -> dict[str, list[str]]:
    """Class name to the files that define it, nested classes included."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_class_names_are_unique() -> None:
    found = places()
    assert len(found) > 400, "the package was read"
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
