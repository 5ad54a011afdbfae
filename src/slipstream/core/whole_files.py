"""Files that are there whole or not at all, whoever reads them and whatever ends their writer."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(file: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace a file by `data`, for its owner alone: a reader sees the old one or the new one, whole.

    With `sync` that holds after a crash of the whole system too. Raises `OSError`.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if sync:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Have the system write down which files a folder has."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
