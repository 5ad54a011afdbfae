"""What a conversion wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint:
    """The checkpoints that an engine must load, and what its user must know of them."""

    target: Path | None = None
    """None: the engine loads the record's target as it is."""
    draft: Path | None = None
    """None: the engine loads the record's draft model or head as it is, or the record has none."""
    files: tuple[Path, ...] = ()
    """All files that were written."""
    notes: tuple[str, ...] = ()
    """A line each, for the user."""
