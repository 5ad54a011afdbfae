"""What the pages of results have in common: where they were measured, tables, marked parts, wrapped prose, refusals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any


def machine(origin: Mapping[str, Any]) -> str:
    """Where and when the provenance `origin` says that a result was measured."""
    commit = str(origin["commit"] or "unknown")[:12]
    cpu = origin["cpu"] + (f" ({origin['instructions']})" if "instructions" in origin else "")
    return f"{cpu}, {origin['num_cores']} cores, {origin['date']}, commit {commit}"


def write_between(file: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between the marks `begin` and `end` of a page that people wrote."""
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    file.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def table(head: Seq[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table."""
    return [row(head), f"|{'---|' * len(head)}", *map(row, rows)]


def row(cells: Iterable[object]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def wrapped(text: str) -> str:
    """Prose of at most 118 characters a line; tables and pictures stay as they are."""
    return "\n".join(map(_wrapped, text.split("\n")))


def _wrapped(line: str) -> str:
    if line.startswith(("|", "!")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def refusals(reasons: Iterable[tuple[str, str]]) -> str:
    """The table of what cannot run, label and reason; empty where all can."""
    rows = [(label, why.replace("|", "\\|").replace("<", "&lt;")) for label, why in reasons]
    return "\n".join([*table(("cannot run", "why"), rows), ""]) if rows else ""
