"""What the pages of results have in common: wrapped prose, and the tables of refusals and of versions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any


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
    rows = [
        f"| {label} | {reason} |"
        for label, reason in ((each, why.replace("|", "\\|").replace("<", "&lt;")) for each, why in reasons)
    ]
    return "\n".join(["| cannot run | why |", "|---|---|", *rows, ""]) if rows else ""


def versions(entries: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """The section of versions and settings: labels and entries of modes, the first of each label."""
    rows: dict[str, str] = {}
    for label, entry in entries:
        definition = entry["definition"]
        found = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        given = [f"`{name}`: `{definition[name]}`" for name in ("load", "call") if definition[name]]
        rows.setdefault(label, f"| {label} | {found} | {'; '.join([*entry['notes'], *given])} |")
    heading = ["## Versions and settings", "", "| mode | versions | settings |", "|---|---|---|"]
    return "\n".join([*heading, *rows.values(), ""])
