"""Two results side by side, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import page

_MIB = 2**20
_COLUMNS = (
    "longest delay of a small request, s",
    "of /health, s",
    "small requests that failed",
    "memory grown (at most), MiB",
    "warnings in the log",
    "forged lines",
    "statuses",
    "survived",
)
_EXTRA = ("header_mib_taken", "num_connections", "still_open_after_40_s", "cached_tokens_of_another_key")


def table(after: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """A row for each scenario; with `before`, each cell holds both figures."""
    rows = []
    for name, figures in after.items():
        cells = _cells(figures)
        if before is not None:
            earlier = _cells(before[name]) if name in before else ["not run"] * len(cells)
            cells = [f"{a} → {b}" for a, b in zip(earlier, cells, strict=True)]
        rows.append([figures["what"], *cells])
    return "\n".join(page.table(["attack", *_COLUMNS], rows))


def _cells(figures: Mapping[str, Any]) -> list[str]:
    small, health = figures["small_requests"], figures["health"]
    grown = [figures[key] / _MIB for key in ("rss_growth_bytes", "rss_peak_growth_bytes")]
    statuses = [f"{n} x {status}" for status, n in figures["statuses"].items()]
    statuses += [f"finish_reason {reason}: {n}" for reason, n in figures["finish_reasons"].items()]
    statuses += [f"{key.replace('_', ' ')}: {figures[key]}" for key in _EXTRA if key in figures]
    survived = "yes" if figures["survived"] else f"no (exit code {figures['exit_code']})"
    return [
        f"{small['longest_s']:.2f}",
        f"{health['longest_s']:.2f}",
        f"{small['num_failed']} of {small['num_requests']}",
        f"{grown[0]:.0f} ({grown[1]:.0f})",
        str(figures["num_warning_lines"]),
        str(figures["num_forged_lines"]),
        ", ".join(statuses) or "none",
        "killed at the memory bound" if figures["killed_for_memory"] else survived,
    ]
