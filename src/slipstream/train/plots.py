"""Plots of loss and τ over tokens, from a run's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.text.jsonl import read_rows

FILES = ("training.svg", "training.png")


def draw(folder: Path) -> None:
    """Plot `log.jsonl` of `folder` into pictures next to it; does nothing for an empty log."""
    log = folder / "log.jsonl"
    rows = [row for _, row in read_rows(log)] if log.exists() else []
    training = [row for row in rows if row["event"] == "train"]
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    if not training:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(_tokens(training), [row["loss"] for row in training], label="loss")
    upper.set_ylabel("loss")
    for kind in ("greedy", "sampled"):
        lower.plot(_tokens(evaluations), [row[kind]["tau"] for row in evaluations], marker="o", label=kind)
    lower.set_ylabel("τ, tokens per target pass")
    lower.set_xlabel("training tokens, million")
    lower.legend(loc="lower right")  # "best" takes long over many points
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    for name in FILES:
        partial = folder / f"partial.{name}"
        figure.savefig(partial)
        partial.replace(folder / name)


def _tokens(rows: list[dict[str, Any]]) -> list[float]:
    return [row["tokens"] / 1e6 for row in rows]
