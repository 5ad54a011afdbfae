"""One self-contained HTML page, in dark and light, readable on a phone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from slipstream.tools.bench.report.grid import Grid, number
from slipstream.tools.bench.report.plots import series_variable

Legend = list[tuple[str, str]]
"""Names, and the names of the page's colours."""


@dataclass(frozen=True)
class Plot:
    """A drawing with its caption and legend."""

    title: str
    svg: str
    caption: str
    legend: Legend = field(default_factory=list)
    """For colours that differ from the page's legend."""


@dataclass(frozen=True)
class Page:
    """The contents of the page, from top to bottom."""

    title: str
    subtitle: str
    verdict: str
    warnings: Seq[str]
    legend: Legend
    plots: Seq[Plot]
    grids: Seq[Grid]
    remarks: Seq[str]
    method: Seq[str]
    details: Seq[tuple[str, str]]
    command: str

    def html(self) -> str:
        """The page as HTML, with every text escaped."""
        loader = PackageLoader("slipstream.tools.bench.report", ".")
        environment = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        return environment.get_template("page.html.j2").render(vars(self))


def legend(names: Seq[str], first: int) -> Legend:
    """Names and colours of series; the first one has number `first`."""
    return [(name, series_variable(place)) for place, name in enumerate(names, first)]


def provenance_rows(provenance: dict[str, Any], workload: Any, repeats: int) -> list[tuple[str, str]]:
    """What a reader needs to repeat the benchmark: (name, text)."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    prompts = ", ".join(f"{task} {num}" for task, num in workload.num_prompts.items())
    lengths = "from the data" if workload.max_tokens is None else f"at most {workload.max_tokens} tokens"
    threads = "1 thread" if provenance["threads"] == 1 else f"{provenance['threads']} threads"
    memory = number(provenance["memory_bytes"] / 2**30, 0)
    return [
        ("date", provenance["date"]),
        (
            "machine",
            f"{provenance['cpu']}, {provenance['num_cores']} cores, {memory} GiB, {provenance['platform']}",
        ),
        ("runs on", f"{provenance['device']}, {threads}"),
        ("commit", provenance["commit"] or "no checkout"),
        ("versions", f"Slipstream {provenance['slipstream']}, Python {provenance['python']}, {versions}"),
        ("workload", f"{workload.source}: {prompts}"),
        ("answers", f"{lengths}, {repeats} times each"),
    ]
