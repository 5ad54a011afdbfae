"""The tables and notes of a benchmark on engines in this process."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.plan.sizes import format_bytes
from slipstream.tools.bench.report.grid import (
    NONE,
    Grid,
    at_once,
    count,
    interval,
    milliseconds,
    number,
    rates,
    sample_size,
    share,
)
from slipstream.tools.bench.result import BenchResult, EngineFigures


def tables(result: BenchResult) -> list[Grid]:
    """Tables of speed, drafts and time at each concurrency, then speedup by task and throughput by concurrency."""
    grids: list[Grid] = []
    for concurrency in result.concurrencies:
        figures = [f for f in result.figures if f.concurrency == concurrency and f.task is None]
        grids += [_speed(figures, concurrency), _drafts(figures, concurrency), _time(figures, concurrency)]
    drafters = [c.name for c in result.configurations if c.method != "off" and result.of(c.name, 1)]
    if drafters and len(result.tasks) > 1:
        grids.append(_by_task(result, drafters))
    if len(result.concurrencies) > 1:
        grids.append(_throughput(result))
    return grids


def remarks(result: BenchResult) -> list[str]:
    """Notes for reading the figures."""
    lines = [*_incomplete(result), *(f"note: {label}" for label in result.labels)]
    if result.peak_rss_bytes is not None:
        lines.append(
            f"peak memory: {format_bytes(result.peak_rss_bytes)}, the whole process with all engines in memory "
            "at once"
        )
    if result.peak_device_bytes is not None:
        lines.append(f"peak GPU memory: {format_bytes(result.peak_device_bytes)}, all engines together")
    if result.interleaved_by == "round":
        lines.append(
            "note: memory has room for one engine at a time, so runs were interleaved round by round"
        )
    workload = result.workload
    if workload.num_too_long:
        lines.append(
            f"note: {workload.num_too_long} prompts were skipped: too long for the context with their answer"
        )
    if workload.num_unusable:
        lines.append(f"note: {workload.num_unusable} entries of the workload have no prompt and were skipped")
    lines += [
        f"note: {c.name}: verifier {c.verifier} preserves the distribution of texts, not each text"
        for c in result.configurations
        if not c.reproducible and result.sampling["temperature"] > 0
    ]
    return lines


def _speed(figures: Seq[EngineFigures], concurrency: int) -> Grid:
    means = "speedup: geometric mean of the tasks'; " if concurrency == 1 else ""
    grid = Grid(
        f"Speed, {at_once(concurrency)}",
        (
            "",
            "tokens/s",
            "speedup",
            "95 % interval",
            "prompts" if concurrency == 1 else "batches",
            "first token ms",
            "token ms",
            "answer ms",
        ),
        f"{means}latencies: p50 / p90 / p99",
    )
    for f in figures:
        grid.add(
            f.configuration,
            number(f.tokens_per_s, 1),
            number(f.speedup),
            interval(f.speedup_interval),
            sample_size(f.num_pairs),
            milliseconds(f.time_to_first_token_s),
            milliseconds(f.time_per_output_token_s, 1),
            milliseconds(f.latency_s),
        )
    return grid


def _drafts(figures: Seq[EngineFigures], concurrency: int) -> Grid:
    grid = Grid(
        f"Drafts, {at_once(concurrency)}",
        ("", "τ", "α", "α by position", "drafted", "wasted", "texts identical", "first differing"),
        "α: accepted over drafted, by position over the steps that reached it; τ: tokens a target pass",
    )
    for f in figures:
        a, same = f.acceptance, f.identity
        drafted = a.num_draft_tokens or None
        differing = None if same is None else same.first_differing_token
        grid.add(
            f.configuration,
            number(a.length),
            number(a.rate),
            rates(a.conditional),
            count(drafted),
            f"{count(a.num_wasted_tokens)} ({share(a.num_wasted_tokens / drafted)})" if drafted else NONE,
            NONE if same is None else f"{same.num_identical} of {same.num_compared}",
            NONE if differing is None else f"token {differing}",
        )
    return grid


def _time(figures: Seq[EngineFigures], concurrency: int) -> Grid:
    grid = Grid(
        f"Time, {at_once(concurrency)}",
        ("", "draft", "verify", "other", "step ms", "γ", "c", "v", "predicted", "efficiency", "decoding"),
        "step: one target step of speculation off; predicted: τ/(γ·c + v); "
        "efficiency: measured over predicted speedup; decoding: the same after the first token",
    )
    for f in figures:
        shares, p = f.time_shares, f.prediction
        grid.add(
            f.configuration,
            share(None if shares is None else shares.draft),
            share(None if shares is None else shares.verify),
            share(None if shares is None else shares.other),
            number(None if p is None else 1e3 * p.target_step_s, 1),
            number(None if p is None else p.gamma),
            number(None if p is None else p.c, 3),
            number(None if p is None else p.v),
            number(None if p is None else p.predicted_speedup),
            number(None if p is None else p.efficiency),
            number(None if p is None else p.decode_efficiency),
        )
    return grid


def _by_task(result: BenchResult, drafters: Seq[str]) -> Grid:
    grid = Grid(
        "By task, one request at a time", ("", "prompts", *drafters), "speedup (95 % interval) · α · τ"
    )
    for task in result.tasks:
        found = [result.of(name, 1, task) for name in drafters]
        num_pairs = max((f.num_pairs or 0 for f in found if f is not None), default=None)
        grid.add(task, sample_size(num_pairs), *map(_task_cell, found))
    return grid


def _task_cell(figures: EngineFigures | None) -> str:
    if figures is None:
        return NONE
    bounds = figures.speedup_interval
    speedup = number(figures.speedup) + ("" if bounds is None else f" ({interval(bounds)})")
    return " · ".join([speedup, number(figures.acceptance.rate), number(figures.acceptance.length)])


def _throughput(result: BenchResult) -> Grid:
    grid = Grid(
        "Throughput by requests at once",
        ("", *(str(concurrency) for concurrency in result.concurrencies)),
        "tokens/s (speedup)",
    )
    for configuration in result.configurations:
        cells = [result.of(configuration.name, concurrency) for concurrency in result.concurrencies]
        grid.add(configuration.name, *(_throughput_cell(figures) for figures in cells))
    return grid


def _throughput_cell(figures: EngineFigures | None) -> str:
    if figures is None:
        return NONE
    speedup = "" if figures.speedup is None else f" ({number(figures.speedup)})"
    return number(figures.tokens_per_s, 1) + speedup


def _incomplete(result: BenchResult) -> list[str]:
    if result.complete:
        return []
    if not result.timings:
        return ["interrupted before anything was measured"]
    return [f"interrupted: the figures are of the {len(result.timings)} runs that were made until then"]
