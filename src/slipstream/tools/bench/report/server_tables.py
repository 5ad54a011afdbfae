"""The tables and notes of a benchmark of a server."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.tools.bench.report.grid import Grid, count, milliseconds, number, rates, sample_size
from slipstream.tools.bench.result import ServerFigures, ServerResult

FEW_FOR_P99 = 100
"""With fewer requests, p99 lies between the two largest values."""
Namer = Callable[[ServerFigures], str]


def server_tables(result: ServerResult) -> list[Grid]:
    """Tables of the clients' figures and of the server's counters."""
    return tables_of(result.figures)


def tables_of(figures: Seq[ServerFigures], name: Namer | None = None) -> list[Grid]:
    """`server_tables` for figures; `name` gives the name of each row."""
    grids = [_clients(figures, name or _name)]
    if any(f.server is not None for f in figures):
        grids.append(_counters(figures, name or _name))
    return grids


def server_remarks(result: ServerResult) -> list[str]:
    """Notes for reading the figures."""
    lines: list[str] = []
    if not result.complete:
        lines.append("interrupted: the figures are of the requests that were answered until then")
    return [*lines, *remarks_on(result.figures, result.metrics)]


def remarks_on(all_figures: Seq[ServerFigures], metrics: str) -> list[str]:
    """Notes on figures; `metrics` is the URL of the server's counters, or why there are none."""
    lines: list[str] = []
    if all(figures.server is None for figures in all_figures):
        lines.append(f"note: without the server's own counters: {metrics}")
    if any(f.task is None and 0 < f.num_requests < FEW_FOR_P99 for f in all_figures):
        lines.append(f"note: p99 of fewer than {FEW_FOR_P99} requests is about the longest of them")
    for f in all_figures:
        if f.task is not None:
            continue
        if f.num_requests and f.num_output_tokens is None:
            lines.append(f"note: {_name(f)}: answers lack usage, so tokens are not counted")
        lines += [f"note: {_name(f)}: {times} failed: {error}" for error, times in f.errors.items()]
        lines += [f"disagreement: {_name(f)}: {what}" for what in f.disagreements]
    return lines


def _clients(figures: Seq[ServerFigures], name: Namer) -> Grid:
    grid = Grid(
        "Seen by the clients",
        (
            "",
            "requests",
            "failed",
            "tokens",
            "tokens/s",
            "first token ms",
            "token ms",
            "piece ms",
            "answer ms",
        ),
        "latencies: p50 / p90 / p99; piece: from one streamed piece to the next, which may hold several tokens",
    )
    for f in figures:
        grid.add(
            name(f),
            sample_size(f.num_requests),
            count(f.num_failed),
            count(f.num_output_tokens),
            number(f.tokens_per_s, 1),
            milliseconds(f.time_to_first_token_s),
            milliseconds(f.time_per_output_token_s, 1),
            milliseconds(f.inter_token_latency_s, 1),
            milliseconds(f.latency_s),
        )
    return grid


def _counters(figures: Seq[ServerFigures], name: Namer) -> Grid:
    grid = Grid(
        "The server's own counters",
        ("", "requests", "tokens", "τ", "α", "α by position", "drafted", "wasted"),
        "τ: of the steps that drafted; α by position: a lower bound where drafts vary in depth",
    )
    for f in figures:
        if f.server is None:
            continue
        a = f.server.acceptance
        grid.add(
            name(f),
            count(f.server.num_requests),
            count(f.server.num_output_tokens),
            number(a.length if a else None),
            number(a.rate if a else None),
            rates(a.conditional if a else []),
            count(a.num_draft_tokens if a else None),
            count(a.num_wasted_tokens if a else None),
        )
    return grid


def _name(figures: ServerFigures) -> str:
    return f"{figures.concurrency} at once" if figures.task is None else f"· {figures.task}"
