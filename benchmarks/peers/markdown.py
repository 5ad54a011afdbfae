"""The section of versions and settings of both pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.harness.page import table


def versions(entries: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """The section of versions and settings: labels and entries of modes, the first of each label."""
    rows: dict[str, tuple[str, ...]] = {}
    for label, entry in entries:
        definition = entry["definition"]
        found = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        given = [f"`{name}`: `{definition[name]}`" for name in ("load", "call") if definition[name]]
        rows.setdefault(label, (label, found, "; ".join([*entry["notes"], *given])))
    listed = table(("mode", "versions", "settings"), rows.values())
    return "\n".join(["## Versions and settings", "", *listed, ""])
