"""The tables, notes and plot of a load."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.tools.bench.report.grid import Grid, count, number
from slipstream.tools.bench.report.server_tables import remarks_on, tables_of
from slipstream.tools.bench.result import LoadRequest, LoadResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1b6ca8", "#d1495b", "#3b8e5a")
LATE_S = 0.05
"""A p99 lateness of sending above this means that the client was too slow for the rate."""


def load_tables(result: LoadResult) -> list[Grid]:
    """Tables of the clients' figures, the server's counters, and acceptance by task where responses report it."""
    grids = tables_of(result.figures, lambda figures: figures.task or "all")
    if result.acceptance:
        grid = Grid(
            "Acceptance, as reported in the responses",
            ("", "τ", "α", "drafted", "wasted"),
            "τ: of the steps that drafted",
        )
        for task, found in result.acceptance.items():
            drafted, wasted = count(found.num_draft_tokens), count(found.num_wasted_tokens)
            grid.add(task, number(found.length), number(found.rate), drafted, wasted)
        grids.append(grid)
    return grids


def load_remarks(result: LoadResult) -> list[str]:
    """A summary line, and notes for reading the figures."""
    overall = result.figures[0]
    statuses = ", ".join(f"{status}: {times:,}" for status, times in sorted(result.statuses.items()))
    lines = [
        f"{result.arrivals}; {len(result.requests):,} requests in {result.wall_s:.1f} s, "
        f"{number(overall.requests_per_s)} a second; at most {result.most_at_once} running",
        f"by status: {statuses or 'no responses'}",
    ]
    if not result.complete:
        lines.append(
            f"interrupted: the figures are of the finished requests; {result.num_unfinished} were still running"
        )
    if result.lateness_s is not None and result.lateness_s.p99 > LATE_S:
        lines.append(
            f"note: this client sent {1e3 * result.lateness_s.p99:.0f} ms late (p99): it was too slow for the rate"
        )
    if not result.stream:
        lines.append("note: answers were not streamed, so there are no times of first tokens and of tokens")
    return lines + remarks_on(result.figures, result.metrics)


def plot_load(result: LoadResult, file: Path) -> None:
    """Latencies by when a request was sent, their distributions, and throughput over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, 2)
    answered = [request for request in result.requests if request.error is None]
    failed = [request for request in result.requests if request.error is not None]
    _over_time(upper[0], answered, failed)
    _distributions(upper[1], answered)
    _throughput(lower[0], answered, result.wall_s)
    _under_way(lower[1], result.requests)
    figure.suptitle(f"{result.model}: {result.arrivals}")
    figure.savefig(file)


def _over_time(axes: Axes, answered: Seq[LoadRequest], failed: Seq[LoadRequest]) -> None:
    firsts = [r for r in answered if r.time_to_first_token_s is not None]
    axes.scatter(
        [r.sent_s for r in answered], [r.latency_s for r in answered], s=8, color=_COLOURS[0], label="answer"
    )
    axes.scatter(
        [r.sent_s for r in firsts],
        [r.time_to_first_token_s or 0.0 for r in firsts],
        s=8,
        color=_COLOURS[2],
        label="first token",
    )
    if failed:
        axes.scatter(
            [r.sent_s for r in failed],
            [r.latency_s for r in failed],
            s=16,
            marker="x",
            color=_COLOURS[1],
            label="failed",
        )
    _label(axes, "sent after, s", "latency, s")
    if answered or failed:
        axes.legend(loc="upper right")


def _distributions(axes: Axes, answered: Seq[LoadRequest]) -> None:
    """Cumulative share of requests by latency."""
    named: tuple[tuple[str, str, Callable[[LoadRequest], float | None]], ...] = (
        ("first token", _COLOURS[2], lambda r: r.time_to_first_token_s),
        ("answer", _COLOURS[0], lambda r: r.latency_s),
    )
    for name, colour, of in named:
        values = sorted(value for value in map(of, answered) if value is not None)
        if values:
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", color=colour, label=name)
    _label(axes, "within, s", "requests, %")
    if answered:
        axes.legend(loc="lower right")


def _throughput(axes: Axes, answered: Seq[LoadRequest], wall_s: float) -> None:
    """Tokens a second over time; an answer's tokens are spread evenly from its first token to its end."""
    num_bins = max(1, min(60, round(wall_s)))
    width_s = wall_s / num_bins
    tokens = [0.0] * num_bins
    for request in answered:
        end_s = request.sent_s + request.latency_s
        begin_s = request.sent_s + (request.time_to_first_token_s or 0.0)
        first, last = (max(0, min(num_bins - 1, int(at_s / width_s))) for at_s in (begin_s, end_s))
        for place in range(first, last + 1):
            tokens[place] += (request.num_output_tokens or 0) / (last - first + 1)
    places = [(place + 0.5) * width_s for place in range(num_bins)]
    axes.bar(places, [value / width_s for value in tokens], width=width_s, color=_COLOURS[0])
    _label(axes, "time, s", "tokens a second")


def _under_way(axes: Axes, requests: Seq[LoadRequest]) -> None:
    changes = sorted([(r.sent_s, 1) for r in requests] + [(r.sent_s + r.latency_s, -1) for r in requests])
    level, levels = 0, []
    for _, change in changes:
        level += change
        levels.append(level)
    axes.step([at_s for at_s, _ in changes], levels, where="post", color=_COLOURS[0])
    _label(axes, "time, s", "running requests")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
