"""The page and the picture of `benchmarks.advise`: advice beside what an exhaustive grid measures."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

TITLES = {"embedded": "embedded pair", "300m": "0.3 G, float32", "300m-int8": "0.3 G, int8"}
TOLERANCE = 0.10


def write_page(result: Mapping[str, Any], json_file: Path) -> None:
    """Write the page and the picture beside the result."""
    picture = json_file.with_suffix(".svg")
    _draw(result["cells"], picture)
    json_file.with_suffix(".md").write_text(page(result, json_file.name, picture.name), encoding="utf-8")


def page(result: Mapping[str, Any], json_name: str, picture_name: str) -> str:
    """The page's text."""
    summary, origin, cells = result["summary"], result["provenance"], result["cells"]
    number = summary["cells"]
    command = "python -m benchmarks.advise" + (" --quick" if result["quick"] else "")
    return "\n".join(
        [
            "# Is the advice right?",
            "",
            f"Written by `{command}`; do not edit. [Raw result]({json_name}).",
            "",
            "The advice records a model's answers without speculation once, and predicts how fast each drafter and",
            "depth would be. Here every one of them is also run on the same requests, in turns. Speedups are over",
            "speculation off. [What advice is](../guides/advise.md).",
            "",
            f"- {origin['cpu']}, {origin['threads']} threads, {origin['date']}, commit {origin['commit'][:12]}",
            "- predicted speedup of the setting that is predicted to be best, within 10 % of the measured one:",
            f"  {summary['speedup_within_10_percent']} of {number} cells (bar: 15 of 18)",
            f"- its tokens a second within 10 %: {summary['goodput_within_10_percent']} of {number}; a machine's",
            "  speed drifts between the advice and the grid, which a speedup does not see",
            f"- the advised setting within 3 % of the fastest of the grid: {summary['choice_within_3_percent']} of "
            f"{number}",
            f"- cells in which nothing beats off: {summary['off_is_best']}; of them advised not to enable speculation:",
            f"  {summary['of_them_advised_off']}",
            "",
            f"![Predicted over measured speedup of every setting]({picture_name})",
            "",
            "| model | traffic | at once | advised | fastest in the grid | advised over it | predicted to be best "
            "| predicted | measured | turns |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_row(cell) for cell in cells),
            "",
            "The fastest of a grid is the luckiest of equals too: where several settings are equally fast, the one",
            "that is called fastest was measured a little too fast, and the advised one looks slower than it is.",
            "",
        ]
    )


def _row(cell: Mapping[str, Any]) -> str:
    best = cell["predicted_best"]
    words = [
        TITLES[cell["model"]],
        cell["traffic"],
        cell["load"],
        cell["advised"],
        cell["fastest"],
        f"{cell['advised_over_fastest']:.2f}",
        best,
        f"{cell['predicted_speedup'][best]:.2f}",
        f"{cell['speedup'][best]:.2f}",
        cell["turns"],
    ]
    return f"| {' | '.join(map(str, words))} |"


def _draw(cells: Seq[Mapping[str, Any]], file: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "advise", "font.size": 10}):
        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot()
        for marker, (model, title) in zip("os^", TITLES.items(), strict=True):
            points = [
                (cell["predicted_speedup"][name], cell["speedup"][name])
                for cell in cells
                if cell["model"] == model
                for name in cell["speedup"]
                if name != "off"
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker, label=title, alpha=0.7, markersize=5)
        low, high = 0.4, max(max(axes.get_xlim()[1], axes.get_ylim()[1]), 1.5)
        axes.plot([low, high], [low, high], color="#57606a", linewidth=1)
        for share in (1 - TOLERANCE, 1 + TOLERANCE):
            axes.plot([low, high], [low * share, high * share], color="#57606a", linewidth=0.7, linestyle=":")
        axes.set_xlabel("predicted speedup")
        axes.set_ylabel("measured speedup")
        axes.set_title("Every setting of the grid; dotted lines: 10 %")
        axes.legend()
        figure.savefig(file, format="svg", metadata={"Date": None})
