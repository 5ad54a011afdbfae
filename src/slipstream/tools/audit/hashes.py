"""Hashes of local model files, so that a certificate says of which bytes it speaks."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model")


def file_hashes(model: str | None) -> dict[str, str]:
    """File name to SHA-256 of a checkpoint's files; empty where `model` is not a local folder or file."""
    if model is None:
        return {}
    path = Path(model).expanduser()
    if path.is_file():
        return {path.name: _sha256(path)}
    if not path.is_dir():
        return {}
    return {
        file.name: _sha256(file)
        for file in sorted(path.iterdir())
        if file.suffix in _SUFFIXES and file.is_file()
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
