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
from benchmarks.harness.command import names
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models import RowGroup, load_model


def test_packed_texts_are_all_tokens_in_order() -> None:
    texts = [[1, 2, 3], [4], [5, 6, 7]]
    assert quantization.pack(texts, 3) == [[1, 2, 3], [4, 5, 6]]  # one token alone predicts nothing
    assert quantization.pack(texts, 5) == [[1, 2, 3, 4, 5], [6, 7]]


def test_types_are_checked_before_any_work() -> None:
    read = names(quantization.CACHES)
    assert read("float32, int8") == ["float32", "int8"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown 'int9'; there are float32, bfloat16"):
        read("int9")


def test_every_pair_is_compared_with_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss a token that is larger by a known amount gives a known ratio."""

    def scored(path: str, weights: str, cache: str, num_prompts: int, packed: int) -> dict[str, Any]:
        loss = 2.0 + 0.5 * (weights == "int8") + 0.25 * (cache == "int8")
        found = quantization.Score(4, 4 * loss, 8.0, 0.5 * (weights == "int8"), 4 - (cache == "int8"))
        return {"conversations": found, "packed": found}

    monkeypatch.setattr(quantization, "scored", scored)
    monkeypatch.setattr(quantization, "RESULT", tmp_path / "quantization.json")
    monkeypatch.setattr(sys, "argv", ["quantization", "m", "--weights", "float32,int8", "--caches", "int8"])
    assert quantization.main() == 0
    rows = json.loads((tmp_path / "quantization.json").read_text())["rows"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        ("float32", "float32"),
        ("float32", "int8"),
        ("int8", "int8"),
    ]
    page = (tmp_path / "quantization.md").read_text()
    assert (
        "| m | float32 | float32 | 7.3891 | 1.00000 | 0.00000 | 100.00% | 7.3891 | 1.00000 | 0.00000 | 100.00% |"
        in page
    )
    assert (
        "| m | int8 | int8 | 15.6426 | 2.11700 | 0.12500 | 75.00% | 15.6426 | 2.11700 | 0.12500 | 75.00% |"
        in page
    )
    assert "Predicted tokens: 4 and 4." in page


def test_scores_are_those_of_the_distributions() -> None:
    """On the embedded target, where the divergence of two models is also computed from whole distributions here."""
    exact = quantization.exact_model(EMBEDDED_TARGET)
    lm = load_model(EMBEDDED_TARGET, quantization="int4", dtype="float32")
    texts = [[2, 45, 78, 17, 784], [2, 410, 263, 2365]]
    found = quantization.score(lm, exact, texts)
    assert found.tokens == 7
    expected = torch.zeros(3)
    for text in texts:
        sides = []
        for side in (lm, exact):
            pool, slots = side.trial_cache(len(text))
            rows = side.forward([RowGroup(slots, 0, text, range(len(text)))], pool).logits[:-1].clone()
            sides.append(torch.distributions.Categorical(logits=rows))
        wanted = torch.tensor(text[1:])
        kl = torch.distributions.kl_divergence(sides[1], sides[0])
        expected -= torch.stack([sides[0].log_prob(wanted).sum(), sides[1].log_prob(wanted).sum(), -kl.sum()])
    torch.testing.assert_close(
        torch.tensor([found.loss, found.exact_loss, found.kl]), expected, rtol=1e-3, atol=1e-4
    )
    same = quantization.score(exact, exact, texts)
    assert (same.kl, same.num_equal, same.loss) == (0.0, 7, same.exact_loss)


def test_calibration_never_sees_what_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def quantise(path: str, out: Path, options: Any, texts: Path, report: Any) -> None:
        seen.append(texts.read_text())

    monkeypatch.setattr(quantization, "quantise", quantise)
    with quantization.saved(EMBEDDED_TARGET, "int4 calibrated", 340):
        rows = [json.loads(line) for line in seen[0].splitlines()]
    assert rows == sample_prompts()[340:]
    with pytest.raises(SystemExit, match="fewer --prompts"), quantization.saved("", "int4 calibrated", 350):
        pass


def quality(weights: str, cache: str, ratio: float) -> dict[str, Any]:
    return {"weights": weights, "cache": cache, "conversations": {"ratio": ratio}}


def test_points_pair_quality_with_the_pass_at_the_shortest_context(tmp_path: Path) -> None:
    speeds = [("int8", 128, 12.0), ("int8", 1536, 20.0), ("int4", 128, 8.0), ("bfloat16", 128, 18.0)]
    losses = {
        "rows": [
            quality("int8", "float32", 1.001),
            quality("int8", "int8", 1.5),
            quality("int4", "float32", 1.02),
            quality("int4 calibrated", "float32", 1.01),
            quality("int4_g64", "float32", 1.03),
        ]
    }
    passes = [{"model": "m", "weights": name, "context": n, "step_ms": ms} for name, n, ms in speeds]
    found = quantization.points(losses, {"rows": passes})
    assert [(point.name, point.step_ms, round(point.lost, 6)) for point in found] == [
        ("int4 calibrated", 8.0, 1.0),
        ("int4", 8.0, 2.0),
        ("int8", 12.0, 0.1),
        ("bfloat16, as stored", 18.0, 0.0),
    ]
    quantization.draw(losses, tmp_path / "quantization.svg")
    assert not list(tmp_path.iterdir())
    (tmp_path / "context_cost.json").write_text(json.dumps({"rows": passes}))
    quantization.draw(losses, tmp_path / "quantization.svg")
    assert "<svg" in (tmp_path / "formats.svg").read_text()
