"""Digests of a checkpoint's files: equal ones compute the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slipstream.core.model_path import gguf_parts

SAMPLE_BYTES = 2**20
"""Bytes of a weight file that are read at each of `NUM_SAMPLES` places: whole large files take minutes."""
NUM_SAMPLES = 16
_READ_WHOLE = (".json", ".txt", ".jinja", ".model")


def digest_of(data: bytes) -> str:
    """32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def files_of(path: Path) -> list[Path]:
    """The files of a folder, or a file; of a GGUF file in parts all that are there."""
    if path.is_file():
        return [part for part in map(Path, gguf_parts(str(path))) if part.is_file()]
    return sorted(file for file in path.iterdir() if file.is_file())


def digest_of_files(model: str) -> str:
    """Return the digest of a folder's or a file's contents, or of a hub id, whose files the hub digests itself."""
    path = Path(model)
    if not path.exists():
        return digest_of(model.encode())
    files = files_of(path)
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        if file.suffix in (".md", ".lock") or file.name.startswith("."):
            continue
        state.update(f"{file.name if path.is_dir() else file.suffix} {file.stat().st_size}\n".encode())
        state.update(_sample(file))
    return state.hexdigest()


def digest_of_model(model: str, *parts: str | None) -> str:
    """Return the digest of a checkpoint, with a tokenizer or an adapter next to it where there is one."""
    together = [model, *(part for part in parts if part is not None)]
    return digest_of("".join(map(digest_of_files, together)).encode())


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    if file.suffix in _READ_WHOLE or size <= SAMPLE_BYTES * NUM_SAMPLES:
        return hashlib.blake2b(file.read_bytes()).digest()
    state = hashlib.blake2b()
    with file.open("rb") as opened:
        for number in range(NUM_SAMPLES):
            opened.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            state.update(opened.read(SAMPLE_BYTES))
    return state.digest()
