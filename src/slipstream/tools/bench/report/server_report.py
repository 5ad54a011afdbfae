"""The HTML page of a benchmark of a server."""

from __future__ import annotations

from slipstream.tools.bench.report.grid import number
from slipstream.tools.bench.report.page import Page, Plot, legend, provenance_rows
from slipstream.tools.bench.report.plots import lines
from slipstream.tools.bench.report.server_tables import server_remarks, server_tables
from slipstream.tools.bench.result import ServerFigures, ServerResult

_QUANTILES = ("p50", "p90", "p99")

_METHOD = (
    "Clients of the server's OpenAI-compatible interface sent the workload in a closed loop: so many requests are "
    "running at once, and when one ends the next is sent. Answers were streamed; tokens are those of `usage`. The "
    "server's own counters were read before and after each concurrency, without the warm-up request.",
)


def render_server(result: ServerResult) -> str:
    """The page as HTML."""
    provenance = result.provenance
    lines_ = server_remarks(result)
    overall = [figures for figures in result.figures if figures.task is None]
    loud = ("interrupted", "disagreement")
    page = Page(
        title=f"{result.model}, measured by its clients",
        subtitle=f"{provenance['date']} · {result.url}",
        verdict=_verdict(overall),
        warnings=[line for line in lines_ if line.startswith(loud)],
        legend=[],
        plots=_plots(overall),
        grids=server_tables(result),
        remarks=[line for line in lines_ if not line.startswith(loud)],
        method=_METHOD,
        details=[
            ("server", result.url),
            ("counters", result.metrics),
            *provenance_rows(provenance, result.workload, result.repeats),
        ],
        command=provenance["command"],
    )
    return page.html()


def _verdict(overall: list[ServerFigures]) -> str:
    measured = [figures for figures in overall if figures.tokens_per_s is not None]
    if not measured:
        return ""
    best = max(measured, key=lambda figures: figures.tokens_per_s or 0)
    failed = sum(figures.num_failed for figures in overall)
    suffix = f"; {failed} requests failed" if failed else ""
    return f"At most {number(best.tokens_per_s, 1)} tokens a second, with {best.concurrency} at once{suffix}."


def _plots(overall: list[ServerFigures]) -> list[Plot]:
    plots: list[Plot] = []
    if len(overall) > 1:
        speeds = {float(f.concurrency): f.tokens_per_s for f in overall if f.tokens_per_s is not None}
        if speeds:
            drawing = lines({1: speeds}, "requests at once", "tokens a second", logarithmic=True)
            plots.append(Plot("Throughput", drawing, "Output tokens of all requests together."))
        plots += _latencies(overall)
    accepted = {
        index: dict(enumerate(f.server.acceptance.conditional, start=1))
        for index, f in enumerate(overall, start=1)
        if f.server is not None and f.server.acceptance is not None
    }
    accepted = {index: points for index, points in accepted.items() if points}
    if accepted:
        drawing = lines(accepted, "position in the draft", "acceptance rate", top=1.05)  # type: ignore[arg-type]
        caption = "From the server's counters; a lower bound where drafts vary in depth."
        names = legend([f"{f.concurrency} at once" for f in overall], 1)
        plots.append(Plot("Acceptance by position", drawing, caption, names))
    return plots


def _latencies(overall: list[ServerFigures]) -> list[Plot]:
    """Time to the first token and to the whole answer, by concurrency."""
    plots: list[Plot] = []
    for title, name in (("First token", "time_to_first_token_s"), ("Whole answers", "latency_s")):
        series: dict[int, dict[float, float]] = {}
        for f in overall:
            found = getattr(f, name)
            for index, quantile in enumerate(_QUANTILES if found is not None else (), start=1):
                series.setdefault(index, {})[f.concurrency] = 1e3 * getattr(found, quantile)
        if series:
            drawing = lines(series, "requests at once", f"ms to {title.lower()}", logarithmic=True)
            caption = f"{title}, seconds counted from when the request was sent."
            plots.append(Plot(title, drawing, caption, legend(_QUANTILES, 1)))
    return plots
