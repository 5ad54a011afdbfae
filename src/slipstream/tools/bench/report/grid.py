"""Tables for a console or a page, and the formats of their figures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from rich.table import Table

from slipstream.tools.bench.statistics import FEW, Interval, Percentiles

NONE = "–"
"""Shown in place of a missing figure."""


@dataclass
class Grid:
    """A table with a title; the first cell of a row is its name."""

    title: str
    columns: Seq[str]
    """Headings; the first one is above the rows' names."""
    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row."""
        assert len(cells) == len(self.columns), (self.title, cells)
        self.rows.append(list(cells))

    def rich(self) -> Table:
        """The table for a console."""
        table = Table(
            title=self.title,
            caption=self.caption or None,
            title_justify="left",
            caption_justify="left",
            box=None,
        )
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def number(value: float | None, digits: int = 2) -> str:
    """1.234 -> '1.23'"""
    return NONE if value is None else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """12345 -> '12,345'"""
    return NONE if value is None else f"{value:,}"


def sample_size(value: int | None) -> str:
    """4 -> '4 (few)'"""
    return count(value) + (" (few)" if value is not None and value < FEW else "")


def share(value: float | None) -> str:
    """0.123 -> '12 %'"""
    return NONE if value is None else f"{100 * value:.0f} %"


def rates(values: Seq[float]) -> str:
    """[0.9, 0.8] -> '0.90 0.80'"""
    return " ".join(number(value) for value in values) or NONE


def interval(value: Interval | None) -> str:
    """'1.10–1.42'"""
    return NONE if value is None else f"{value.low:.2f}–{value.high:.2f}"


def milliseconds(value: Percentiles | None, digits: int = 0) -> str:
    """p50 / p90 / p99 in milliseconds, from seconds."""
    if value is None:
        return NONE
    return " / ".join(number(1e3 * part, digits) for part in (value.p50, value.p90, value.p99))


def at_once(concurrency: int) -> str:
    """A concurrency in words, for headings."""
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at once"
