"""Files that are there whole or not at all, whoever reads them and whatever ends their writer."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_whole(file: Path, data: bytes, *, sync: bool = False) -> None:
    """As `writing_whole`, for data that are all there."""
    with writing_whole(file, sync=sync) as stream:
        stream.write(data)


@contextlib.contextmanager
def writing_whole(file: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Replace a file by what the body writes, for its owner alone: a reader sees the old one or the new one, whole.

    Where the body raises, the old one stays. With `sync` the new one is there after a crash of the whole system too.
    Raises `OSError`.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
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
