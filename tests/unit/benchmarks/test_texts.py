"""`benchmarks.texts --off`: texts with heads beside those without, kept as they are measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import texts

NAMES = ["mtp, chain", "mtp, tree"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, list[dict[str, Any]]]:
    arguments = [
        "--off",
        "mtp",
        "--prompts",
        "3",
        "--max-tokens",
        "6",
        "--output",
        str(folder / "texts.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["texts", *arguments, *more])
    code = texts.main()
    return code, json.loads((folder / "texts.json").read_text())["rows"]


def test_texts_with_a_head_are_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows = run(tmp_path, monkeypatch)
    assert code == 0
    assert [(row["drafter"], row["sampling"]) for row in rows] == [
        (name, way) for name in NAMES for way in texts.TEMPERATURES
    ]
    assert all(row["texts"] == row["equal"] == 3 and row["drafted"] > 0 for row in rows)


def test_another_text_or_a_failed_draft_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on with what it has."""
    asked: list[str] = []

    def answers(_prompts: object, _max_tokens: int, spec: dict[str, Any]) -> dict[str, Any]:
        if spec["method"] == "mtp" and len(asked) == 1:
            asked.append("stopped")
            raise KeyboardInterrupt
        asked.append(spec["method"])
        one = {"token_ids": [[1, 2], [3, 4]], "drafted": 2, "accepted": 1, "failures": 0}
        is_tree = spec.get("num_draft_nodes") is not None
        return {"greedy": one, "seeded": {**one, "token_ids": [[1, 2], [3, 5]]} if is_tree else one}

    monkeypatch.setattr(texts, "both_ways", answers)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch)
    code, rows = run(tmp_path, monkeypatch)
    assert asked == ["off", "stopped", "mtp", "mtp"]
    assert code == 1
    assert [row["differ"] for row in rows] == [[], [], [], [1]]


def test_a_folder_without_heads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="has none of dflash/dflash, dspark/dspark"):
        run(tmp_path, monkeypatch, "--trained", str(tmp_path))
