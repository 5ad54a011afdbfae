"""The page and the picture of `benchmarks.reasoning`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.harness.page import machine, table
from benchmarks.harness.pictures import drawing

SIGNIFICANT = 0.05


def keeps_accuracy(row: dict[str, Any]) -> bool:
    """Not significantly below the target, by McNemar's one-sided exact test."""
    return float(row["p_lower"]) >= SIGNIFICANT


def best(result: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest way with drafted steps whose accuracy is not significantly below the target's; None without one."""
    rows = [row for row in result["rows"] if row["judge"] and "seconds" in row and keeps_accuracy(row)]
    return max(rows, key=lambda row: float(row["over_lossless"]["ratio"]), default=None)


def page(result: dict[str, Any], raw: Path) -> str:
    """The page, in Markdown."""
    origin, settings = result["provenance"], result["settings"]
    rows = result["rows"]
    lines = [
        "# Drafting whole steps of thinking",
        "",
        f"Written by `python -m benchmarks.reasoning`; do not edit. Raw results: [{raw.name}]({raw.name}).",
        "",
        "Lossy: drafted steps are not the target's own text. [What is lost](../guides/reasoning.md#what-is-lost).",
        "",
        f"{settings['problems']} held-out problems of `recipes.reasoning_pair`, greedy. Accuracy, tokens and passes",
        f"are of all of them with the pair as it was trained; time is of the first {settings['timed']}, one at a time,",
        f"with the target cost-expanded to {settings['parameters']} in int8, all ways in turn. *Below* is McNemar's",
        "one-sided p: small where a way is worse than the target, problem by problem. *Bound* is the least difference",
        "in accuracy to the target that 95 % confidence allows. Speed is over the fastest lossless speculation with",
        f"the same draft ({result['fastest_lossless']}), with 95 % intervals by bootstrap over problems.",
        "The threshold is chosen among all of these on the same problems, so its accuracy is seen a little too well.",
        "Accuracy is of the small target in float32 and time of the large one in int8, the same function but for",
        "rounding. The draft is not expanded. One step of thinking is protected at the beginning and one at the end;",
        "*both* drafts up to four tokens beside the steps. Target and draft were taught to word their steps",
        "differently, which is our choice and decides how well lossless speculation does.",
        "",
        f"{machine(origin)}.",
        "",
        "![Accuracy against speed](" + raw.with_suffix(".svg").name + ")",
        "",
        *textwrap.wrap(" ".join(_verdict(result)), 118, break_on_hyphens=False),
        "",
        *_table([row for row in rows if not row["judge"]]),
    ]
    for judge, title in (("score", "The target's mark"), ("logprob", "The mean log-probability")):
        lines += ["", f"## {title}", ""]
        lines += _table([row for row in rows if row["judge"] == judge])
    return "\n".join(lines) + "\n"


def _verdict(result: dict[str, Any]) -> list[str]:
    """Whether the bar was met, in words."""
    bar, found = result["bar"], best(result)
    asked = f"a threshold not significantly below the target and {bar} times as fast as lossless speculation alone"
    if found is None:
        return [f"The bar, {asked}: **missed**. No way with drafted steps kept the target's accuracy."]
    speed = found["over_lossless"]
    said = (
        f"{found['name']}: {speed['ratio']:.2f} times ({speed['low']:.2f} to {speed['high']:.2f}) at "
        f"{found['accuracy']:.1%} right (target {result['rows'][0]['accuracy']:.1%}, p {found['p_lower']:.2f})"
    )
    if speed["ratio"] >= bar:
        return [f"The bar, {asked}: **met** by {said}."]
    why = (
        f"{found['kept_share']:.0%} of its steps were kept; the others were drafted and checked for nothing, and the "
        "first and the last step of an answer are always the target's."
    )
    return [f"The bar, {asked}: **missed**. The nearest is {said}. {why}"]


def _table(rows: Seq[dict[str, Any]]) -> list[str]:
    head = (
        *("way", "right", "interval", "lost, won", "below", "bound"),
        *("tokens", "passes", "kept steps", "speed", "interval"),
    )
    return table(head, map(_row, rows))


def _row(row: dict[str, Any]) -> list[str]:
    speed = row.get("over_lossless")
    return [
        row["name"],
        f"{row['accuracy']:.1%}",
        f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
        f"{row['lost']}, {row['won']}",
        f"{row['p_lower']:.3f}",
        f"{100 * row['least_difference']:+.1f} points",
        f"{row['tokens']:.0f}",
        f"{row['passes']:.0f}",
        f"{row['kept_share']:.0%}" if row["judge"] else "",
        "" if speed is None else f"{speed['ratio']:.2f}",
        "" if speed is None else f"{speed['low']:.2f} to {speed['high']:.2f}",
    ]


def draw(result: dict[str, Any], file: Path) -> None:
    """Accuracy against speed: a curve for each judge, a point for each alternative."""
    rows = [row for row in result["rows"] if "seconds" in row]
    with drawing(file, 7.5, 4.5) as figure:
        axes = figure.subplots()
        for judge in ("score", "logprob"):
            for kind, style in (("steps", "--"), ("both", "-")):
                curve = [row for row in rows if (row["judge"], row["kind"]) == (judge, kind)]
                if curve:
                    axes.plot(
                        [row["over_lossless"]["ratio"] for row in curve],
                        [100 * row["accuracy"] for row in curve],
                        style,
                        marker="o",
                        label=f"{kind}, {judge}",
                    )
        for row in rows:
            if not row["judge"]:
                place = (row["over_lossless"]["ratio"], 100 * row["accuracy"])
                axes.plot(*place, "k*")
                axes.annotate(row["name"], place, textcoords="offset points", xytext=(6, 4), fontsize=8)
        axes.set_xlabel(f"times as fast as {result['fastest_lossless']}")
        axes.set_ylabel("right answers (%)")
        axes.grid(alpha=0.3)
        if rows:
            axes.legend(fontsize=8)
