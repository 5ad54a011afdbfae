"""The page's two plots: acceptance by task, and speedup by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness.pictures import drawing


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Write `drafter_tau.svg` and `drafter_speedup.svg`."""
    height = 0.9 + 0.25 * len({row["drafter"] for row in _rows(results)})
    with drawing(folder / "drafter_tau.svg", 9.5, height, **_STYLE) as figure:
        _tau(results, figure)
    if results["speed"]:
        height = 0.9 + 0.3 * len(_timed(results))
        with drawing(folder / "drafter_speedup.svg", 7.5, height, **_STYLE) as figure:
            _speedup(results, figure)


_STYLE: dict[str, Any] = {"font_size": 9, "svg_hashsalt": "drafters"}


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results["acceptance"]["rows"] if "verifier" not in row["drafter"]]


def _timed(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["drafter"] for speed in results["speed"] for row in speed["rows"][1:]))


def _tau(results: Mapping[str, Any], figure: Figure) -> None:
    """A square a drafter and task, for each temperature."""
    rows = _rows(results)
    tasks = sorted({row["task"] for row in rows})
    temperatures = sorted({row["temperature"] for row in rows})
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    tau = {(row["drafter"], row["temperature"], row["task"]): row["tau"] for row in rows}
    for axes, temperature in zip(
        figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0], temperatures, strict=True
    ):
        grid = [[tau.get((name, temperature, task), float("nan")) for task in tasks] for name in names]
        axes.imshow(grid, cmap="viridis", vmin=1.0, vmax=max(tau.values()), aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                if value == value:  # not measured at this temperature otherwise
                    axes.text(
                        x,
                        y,
                        f"{value:.1f}",
                        ha="center",
                        va="center",
                        color="white" if value < 2.6 else "black",
                    )
        axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title("τ, greedy" if temperature == 0 else f"τ, temperature {temperature}")


def _speedup(results: Mapping[str, Any], figure: Figure) -> None:
    """A point with its interval a drafter and target; left of 1 a drafter costs more than it gains."""
    speeds = results["speed"]
    names = _timed(results)
    axes = figure.subplots()
    axes.axvline(1.0, color="gray", linewidth=1)
    for number, speed in enumerate(speeds):
        offset = 0.25 * (number - (len(speeds) - 1) / 2)
        rows = {row["drafter"]: row for row in speed["rows"]}
        places = [place for place, name in enumerate(names) if name in rows]
        values = [rows[names[place]]["speedup"] for place in places]
        axes.plot(
            values, [p + offset for p in places], "osD"[number % 3], color=f"C{number}", label=speed["model"]
        )
        for place in places:
            interval = rows[names[place]]["speedup_interval"]
            if interval is not None:
                axes.plot(
                    [interval["low"], interval["high"]],
                    [place + offset] * 2,
                    color=f"C{number}",
                    linewidth=1.2,
                )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("tokens/s over speculation off, 95 % interval")
    axes.legend(loc="lower right")
