"""Checkpoints in an engine's layout, along with its setting; `slipstream.tools.export.checkpoints` converts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.tools.export.head_info import AuxLayers, HeadInfo, head_info
from slipstream.tools.export.record import SpeculativeRecord

FOLDER = "checkpoint"
"""Folder of the converted checkpoints, in the folder of the setting."""


def check_destination(record: SpeculativeRecord, place: Path, overwrite: bool, flag: str) -> None:
    """Raise `ConfigError` where converted checkpoints in the folder `place` would write over what is there.

    With `overwrite` that is allowed, but never for the record's own checkpoints. `flag` is what chose the folder.
    """
    if place.exists() and not place.is_dir():
        raise ConfigError(f"cannot write checkpoints into {str(place)!r}: it is a file")
    for path in (record.target, record.model):
        if path is not None and Path(path).exists() and Path(path).resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"cannot convert {path!r} over itself; choose another {flag}")
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise ConfigError(
            f"cannot write checkpoints into {str(place)!r}: there are files already; choose another {flag}, or add "
            "--overwrite"
        )


def converted(
    record: SpeculativeRecord, engine: str, place: Path, version: str | None = None
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """(`record` with the paths of what was written into `place`, notes).

    Raises `ExportError` where the engine cannot load what was requested.
    """
    from slipstream.tools.export.checkpoints import convert

    engine = engine.replace("-", "_")
    made = convert(record, engine, place, version=version)
    if made.target is not None:
        record = replace(record, target=str(made.target))
    if made.draft is not None:  # a folder of ours, of which the hub knows no revision
        head = _info(made.draft, engine)
        record = replace(record, model=str(made.draft), revision=None, head=head)
    return record, made.notes


def _info(draft: Path, engine: str) -> HeadInfo | None:
    """What the written head says of itself; its layers are in the engine's numbers."""
    from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS

    info = head_info(draft)
    if info is None or info.aux_layers is None or DIALECTS[engine].layer_shift == 0:
        return info
    return replace(info, aux_layers=AuxLayers(info.aux_layers.ids, "after_layer"))


def converted_back(
    record: SpeculativeRecord, engine: str, place: Path
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """(`record`, whose checkpoints are `engine`'s, with the paths of what Slipstream loads, notes).

    Raises `ExportError` or `ModelError` where Slipstream would not run them as that engine does.
    """
    from slipstream.tools.export.checkpoints import convert_back

    made = convert_back(record, engine.replace("-", "_"), place)
    if made.target is not None:
        record = replace(record, target=str(made.target))
    if made.draft is not None:
        record = replace(record, model=str(made.draft), revision=None)
    return record, made.notes
