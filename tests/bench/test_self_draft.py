"""The table of a target's own drafts: what is measured on the embedded target, and what the page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import self_draft


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_draft, "RESULT", tmp_path / "self_draft.json")
    arguments = ["--formats", "int4", "--prompts-per-task", "1", "--max-tokens", "6", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["self_draft", *arguments])
    self_draft.main()
    [row] = json.loads((tmp_path / "self_draft.json").read_text())["rows"]
    assert row["draft"] == "int4"
    assert row["identical"] == row["prompts"] == 7
    assert 0.3 < row["acceptance"] <= 1
    assert row["c"] > 0
    assert row["speedup"] > 0
    page = (tmp_path / "self_draft.md").read_text()
    assert f"| {row['acceptance']:.1%} |" in page
