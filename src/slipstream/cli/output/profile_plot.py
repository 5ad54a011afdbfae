"""Plots step times over rows, with their roofline times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.output.writing import check_file
from slipstream.errors import ConfigError
from slipstream.profiling.profile import CostProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".pdf", ".png", ".svg")
_COLOURS = ("#1b6ca8", "#d1495b", "#3b8e5a", "#8a5fbf", "#b8860b")


def check_plot(file: Path, overwrite: bool) -> None:
    """Raise `ConfigError` when `file` cannot be written as a plot, before anything is measured."""
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot writes {', '.join(SUFFIXES)}; {str(file)!r} has another suffix")
    check_file(file, overwrite, "--plot")


def plot_profiles(profiles: Mapping[str, CostProfile], file: Path) -> None:
    """Draw one panel a model: a line for each context with its quartiles, the rooflines dashed and dotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(profiles), 4.8), layout="constrained")
    for axes, (role, profile) in zip(
        figure.subplots(1, len(profiles), squeeze=False)[0], profiles.items(), strict=True
    ):
        _draw(axes, profile)
        axes.set_title(
            f"{role}: {profile.key.model.split('-')[0]}, {profile.num_weights / 1e6:,.1f} M weights"
        )
    key = next(iter(profiles.values())).key
    device = key.cpu if key.device == "cpu" else key.device
    figure.suptitle(f"Time of a step by rows · {device}, {key.num_threads} threads, {key.dtype}")
    figure.savefig(file)


def _draw(axes: Axes, profile: CostProfile) -> None:
    for number, context in enumerate(profile.contexts):
        times = [time for time in profile.step_times if time.context == context]
        rows = [time.rows for time in times]
        medians = [time.median_s * 1e3 for time in times]
        below = [(time.median_s - time.q1_s) * 1e3 for time in times]
        above = [(time.q3_s - time.median_s) * 1e3 for time in times]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(rows, medians, (below, above), color=colour, fmt="none", capsize=3)
        axes.plot(rows, medians, color=colour, marker="o", label=f"measured, context {context}")
        reading = [profile.memory_roofline_s(time) * 1e3 for time in times]
        axes.plot(
            rows, reading, color=colour, linestyle="--", label=f"to read weights and cache, context {context}"
        )
    computing = [profile.compute_roofline_s(time) * 1e3 for time in times]
    axes.plot(rows, computing, color="0.4", linestyle=":", label="to compute")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.set_xlabel("rows of a step")
    axes.set_ylabel("ms, median and quartiles")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")
