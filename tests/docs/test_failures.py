"""docs/concepts/failures.md names a test for every failure: each must exist, and say something."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/concepts/failures.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| failure |")
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: Path) -> dict[str, bool]:
    """Name of each test function in a file, and whether `make test` leaves it to `make test-long`."""
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text())
    all_long = any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and "pytest.mark.long" in ast.unparse(node)
        for node in tree.body
    )
    return {
        node.name: all_long or any(ast.unparse(mark) == "pytest.mark.long" for mark in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_the_page_has_the_reported_failures() -> None:
    assert len(ROWS) >= 40
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_named_test_exists(row: list[str]) -> None:
    assert len(row) == 3
    before, _, long = row[2].partition("long:")
    assert NAMED.findall(before) or NAMED.findall(long), "a failure without a test"
    assert len(NAMED.findall(row[2])) == row[2].count("::"), "a name that cannot be read"
    for part, is_long in ((before, False), (long, True)):
        for path, name in NAMED.findall(part):
            tests = functions_of(ROOT / path)
            assert name in tests, f"{path} has no {name}"
            assert tests[name] == is_long, f"{path}::{name}: the page says which tests are long"
