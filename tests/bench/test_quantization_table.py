"""The table of perplexities by weight and cache type: how texts are packed, what is asked for, what the page says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quantization


def test_packed_texts_are_all_tokens_in_order() -> None:
    texts = [[1, 2, 3], [4], [5, 6, 7]]
    assert quantization.pack(texts, 3) == [[1, 2, 3], [4, 5, 6]]  # one token alone predicts nothing
    assert quantization.pack(texts, 5) == [[1, 2, 3, 4, 5], [6, 7]]


def test_types_are_checked_before_any_work() -> None:
    read = quantization.names(quantization.CACHES)
    assert read("float32, int8") == ["float32", "int8"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown 'int9'; there are float32, bfloat16"):
        read("int9")


def test_every_pair_is_compared_with_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss a token that is larger by a known amount gives a known ratio."""

    def scored(path: str, weights: str, cache: str, num_prompts: int, packed: int) -> dict[str, Any]:
        loss = 2.0 + 0.5 * (weights == "int8") + 0.25 * (cache == "int8")
        choices = torch.tensor([0, 0, 0, int(cache == "int8")])
        return {"conversations": (4 * loss, choices), "packed": (4 * loss, choices)}

    monkeypatch.setattr(quantization, "scored", scored)
    monkeypatch.setattr(quantization, "RESULT", tmp_path / "quantization.json")
    monkeypatch.setattr(quantization, "provenance", lambda: {"cpu": "a CPU", "date": "today", "commit": None})
    monkeypatch.setattr(sys, "argv", ["quantization", "m", "--weights", "float32,int8", "--caches", "int8"])
    assert quantization.main() == 0
    rows = json.loads((tmp_path / "quantization.json").read_text())["rows"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        ("float32", "float32"),
        ("float32", "int8"),
        ("int8", "int8"),
    ]
    page = (tmp_path / "quantization.md").read_text()
    assert "| m | float32 | float32 | 7.3891 | 1.00000 | 100.00% | 7.3891 | 1.00000 | 100.00% |" in page
    assert "| m | int8 | int8 | 15.6426 | 2.11700 | 75.00% | 15.6426 | 2.11700 | 75.00% |" in page
    assert "Predicted tokens: 4 and 4." in page
