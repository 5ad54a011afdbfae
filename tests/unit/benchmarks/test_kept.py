"""A long measurement that is stopped keeps the cells that it has ended, and says how far it is without a terminal."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks.harness.kept import Kept

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def stopped() -> None:
    raise KeyboardInterrupt


def never() -> None:
    raise AssertionError("measured again")


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    result.write_text("the one before")
    first = Kept(result, {"rounds": 3})
    assert first.cell("a, 1 at once", lambda: {"ratio": (1.5, 2)}) == {"ratio": [1.5, 2]}
    with pytest.raises(KeyboardInterrupt):
        first.cell("b, 1 at once", stopped)
    assert result.read_text() == "the one before"
    assert json.loads((tmp_path / "result.partial.json").read_text())["cells"].keys() == {"a, 1 at once"}
    told = capsys.readouterr().err.splitlines()
    assert told == ["a, 1 at once …", "a, 1 at once: 0 s", "b, 1 at once …"]

    second = Kept(result, {"rounds": 3})
    assert second.cell("a, 1 at once", never) == {"ratio": [1.5, 2]}
    assert second.cell("b, 1 at once", lambda: 7) == 7
    second.finish({"cells": [1, 2]})
    written = json.loads(result.read_text())
    assert (written.pop("provenance")["commit"], written) == (second.origin["commit"], {"cells": [1, 2]})
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["goes on from 1 cells in result.partial.json", "a, 1 at once: kept"]


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    Kept(tmp_path / "result.json", {"rounds": 3}).put("a", 1)
    other = Kept(tmp_path / "result.json", {"rounds": 4})
    assert not other.has("a")
    assert other.cell("a", lambda: 2) == other.get("a") == 2


def test_cells_of_other_commits_are_merged_and_missing_ones_are_none(tmp_path: Path) -> None:
    first = Kept(tmp_path / "result.json", {"rounds": 3})
    first.put("a", 1)
    merged = Kept(tmp_path / "result.json", {"rounds": 4}, merge=True)
    assert (merged.cell("a", never), merged.cell("b", never)) == (1, None)
    assert merged.origin["commit"] == first.origin["commit"]


@pytest.mark.parametrize(
    "name",
    [
        *("control/__main__", "drafters/__main__", "gpu/__main__", "overhead/__main__"),
        *("quantization", "step_cost"),
    ],
)
def test_no_long_benchmark_writes_its_result_at_the_end_alone(name: str) -> None:
    """Each measures its cells through `Kept`, and none writes its result by itself."""
    source = (BENCHMARKS / f"{name}.py").read_text()
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {"cell", "finish"} <= called
    assert "RESULT.write_text" not in source
