"""The HTML page of a benchmark on engines in this process."""

from __future__ import annotations

from slipstream.tools.bench.report.engine_tables import remarks, tables
from slipstream.tools.bench.report.page import Page, Plot, legend, provenance_rows
from slipstream.tools.bench.report.plots import Estimate, estimates, lines, part_variable, stacks
from slipstream.tools.bench.report.verdict import verdicts
from slipstream.tools.bench.result import EMBEDDED, BenchResult, EngineFigures

MIN_STEPS = 10
"""Positions that fewer steps reached are not drawn."""

_PARTS = ("draft", "verify", "other")

_METHOD = (
    "Every batch of prompts ran under every configuration, one after another, from empty caches and with the same "
    "seeds, in an order that rotates; all of it was repeated, after a warm-up. A batch is one prompt where one "
    "request runs at a time. Speedups are ratios of wall-clock times for the same batches, medians over the repeats; "
    "intervals are 95 % bootstrap intervals over prompts (over batches where several requests run at once).",
    "c and v come from the engine's own steps in the same runs: v is the time of a target pass over the draft over "
    "that of a pass of one row a sequence with speculation off, at the same number of sequences and a similar "
    "context; c is drafting time a level of the draft over the same.",
)


def render(result: BenchResult) -> str:
    """The page as HTML."""
    provenance = result.provenance
    first = result.concurrencies[0] if result.concurrencies else 1
    page = Page(
        title=f"Speculation on {result.model}"
        if result.model != EMBEDDED
        else "Speculation on the embedded pair",
        subtitle=f"{provenance['date']} · {provenance['cpu']} · Slipstream {provenance['slipstream']}",
        verdict=" ".join(verdicts(result)),
        warnings=[line for line in remarks(result) if line.startswith("interrupted")],
        legend=legend([configuration.name for configuration in result.configurations], 0),
        plots=_plots(result, first),
        grids=tables(result),
        remarks=[line for line in remarks(result) if not line.startswith("interrupted")],
        method=_METHOD,
        details=provenance_rows(provenance, result.workload, result.repeats),
        command=provenance["command"],
    )
    return page.html()


def _plots(result: BenchResult, concurrency: int) -> list[Plot]:
    """The plots for which there is data."""
    return [
        plot
        for plot in (
            _speedups(result, concurrency),
            _acceptance(result, concurrency),
            _throughput(result),
            _times(result, concurrency),
        )
        if plot is not None
    ]


def _speedups(result: BenchResult, concurrency: int) -> Plot | None:
    tasks = result.tasks if concurrency == 1 and len(result.tasks) > 1 else []
    rows: dict[str, dict[int, Estimate]] = {}
    for label, task in [*((task, task) for task in tasks), ("all tasks" if tasks else "speedup", None)]:
        row = {
            index: Estimate(figures.speedup, figures.speedup_interval)
            for index, figures in _cells(result, concurrency, task).items()
            if figures.speedup is not None
        }
        if row:
            rows[label] = row
    if not rows:
        return None
    caption = "Times the speed of speculation off, with 95 % intervals where there are two prompts or more."
    if tasks:
        caption += " All tasks: the geometric mean of theirs."
    return Plot("Speedup by task", estimates(rows, "times speculation off", 1.0), caption)


def _acceptance(result: BenchResult, concurrency: int) -> Plot | None:
    series = {
        index: points
        for index, figures in _cells(result, concurrency, None).items()
        if (points := _points(figures))
    }
    if not series:
        return None
    return Plot(
        "Acceptance by position",
        lines(series, "position in the draft", "acceptance rate", top=1.05),
        f"Accepted over the steps that reached and proposed the position; drawn where at least {MIN_STEPS} did.",
    )


def _points(figures: EngineFigures) -> dict[float, float]:
    acceptance = figures.acceptance
    reached = acceptance.reached_per_position
    rates = zip(acceptance.conditional, reached, strict=False)
    return {place: rate for place, (rate, steps) in enumerate(rates, start=1) if steps >= MIN_STEPS}


def _throughput(result: BenchResult) -> Plot | None:
    if len(result.concurrencies) < 2:
        return None
    series: dict[int, dict[float, float]] = {}
    for concurrency in result.concurrencies:
        for index, figures in _cells(result, concurrency, None).items():
            if figures.tokens_per_s is not None:
                series.setdefault(index, {})[concurrency] = figures.tokens_per_s
    drawing = lines(series, "requests at once", "tokens a second", logarithmic=True)
    return Plot("Throughput", drawing, "All requests together, prompts included.")


def _times(result: BenchResult, concurrency: int) -> Plot | None:
    rows: dict[str, list[float]] = {}
    for figures in _cells(result, concurrency, None).values():
        shares, speed = figures.time_shares, figures.tokens_per_s
        if shares is not None and speed:
            rows[figures.configuration] = [1e3 * getattr(shares, part) / speed for part in _PARTS]
    if not rows:
        return None
    return Plot(
        "Where the time goes",
        stacks(rows, "ms a token"),
        "Draft passes, target passes (prompts included) and the rest, divided by the committed tokens.",
        legend=[(name, part_variable(number)) for number, name in enumerate(_PARTS)],
    )


def _cells(result: BenchResult, concurrency: int, task: str | None) -> dict[int, EngineFigures]:
    """Series number to figures; 0 is speculation off."""
    found = {index: result.of(c.name, concurrency, task) for index, c in enumerate(result.configurations)}
    return {index: figures for index, figures in found.items() if figures is not None}
