"""The files that hold a folder's weights: those that its index names, where it has one.

A folder may hold other weights besides its shards, of an earlier version of the model or in another form: the index
decides what counts. Transformers would take `model.safetensors` first, and refuses an index without `metadata`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError

_WHOLE = "model.safetensors"
SAFETENSORS_INDEX = f"{_WHOLE}.index.json"
_INDEXES = (SAFETENSORS_INDEX, "pytorch_model.bin.index.json")


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, those of an adapter left out; none where it has no weights.

    Raises `ModelError` for an index that cannot be read, or names a file that is not next to it.
    """
    found = _index(folder)
    if found is not None:
        return [folder / name for name in _names(folder, *found)]
    files = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("adapter_")]
    return files or [
        file
        for file in sorted(folder.glob("*.bin"))
        if not file.name.startswith(("adapter_", "training_args"))
    ]


@dataclass(frozen=True, slots=True)
class Index:
    """An index as Transformers can read it."""

    name: str
    content: dict[str, Any]
    files: list[str]
    """Names of the files with weights, each once."""
    is_mended: bool
    """Whether the file itself lacks something."""


def mended_index(folder: Path) -> Index | None:
    """A folder's index; None where there is none. Raises `ModelError` as `weight_files` does."""
    found = _index(folder)
    if found is None:
        return None
    index, content = found
    has_metadata = isinstance(content.get("metadata"), dict)
    whole = content if has_metadata else content | {"metadata": {}}
    return Index(index.name, whole, _names(folder, index, content), not has_metadata)


def _index(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    for name in _INDEXES:
        index = folder / name
        if not index.is_file() or (index.name != _INDEXES[0] and (folder / _WHOLE).is_file()):
            continue  # what is in safetensors comes before what is pickled
        return index, read_index(index)
    return None


def read_index(index: Path) -> dict[str, Any]:
    """The content of an index; raises `ModelError` where it is none."""
    try:
        content: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        list(content["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"cannot read {str(index)!r}: it must be a JSON object with weight_map") from None
    return content


def _names(folder: Path, index: Path, content: dict[str, Any]) -> list[str]:
    named = content["weight_map"].values()
    odd = [name for name in named if not _is_file_name(name)]
    if odd:
        raise ModelError(
            f"cannot read {str(index)!r}: its weight_map names {odd[0]!r}, which is no file next to it"
        )
    names = sorted(set(named))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ModelError(
            f"{str(folder)!r} has no {missing[0] if missing else 'weights'}, which {index.name} names"
        )
    return names


def _is_file_name(name: object) -> bool:
    """Whether it names a file, and no folder: an index must not lead out of its own."""
    return isinstance(name, str) and name not in ("", "..") and "\0" not in name and Path(name).name == name
