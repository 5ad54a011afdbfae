"""Checkpoints in an engine's layout, beside its setting; `slipstream.export.checkpoints` converts them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from slipstream.export.contract import ExportError
from slipstream.export.record import SpeculativeRecord


def converted(
    record: SpeculativeRecord, engine: str, folder: Path, version: str | None = None
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """(`record` with the paths of what was written into `folder`, notes).

    Raises `ExportError` where the engine cannot load what was asked for.
    """
    try:
        checkpoints = import_module("slipstream.export.checkpoints")
    except ModuleNotFoundError:
        raise ExportError(
            f"checkpoints cannot be converted for {engine} yet; omit --checkpoint for the setting alone"
        ) from None
    made = checkpoints.convert(record, engine.replace("-", "_"), folder, version=version)
    target = record.target if made.target is None else str(made.target)
    model = record.model if made.draft is None else str(made.draft)
    return replace(record, target=target, model=model), tuple(made.notes)
