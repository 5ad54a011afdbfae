"""Writes the verbs' files: checks them before any work, and reports a failing disk in one line."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write over files that are there, instead of refusing.")
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of a disk that cannot be written."""
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ETXTBSY}
)
"""Error numbers of a path that cannot be created."""
_SAFETENSORS = re.compile(r"I/O error: .*\(os error (\d+)\)")
_TORCH_SAVE = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed")


def check_file(file: Path, overwrite: bool, flag: str = "") -> None:
    """Raise `ConfigError` unless `file` can be created, or overwritten with `overwrite`."""
    parent = file.absolute().parent
    _check(parent.is_dir(), file, f"there is no folder {str(file.parent)!r}", flag)
    _check(not file.is_dir(), file, "it is a folder", flag)
    _check(os.access(file if file.exists() else parent, os.W_OK), file, "it may not be written", flag)
    is_kept = file.is_file() and not overwrite
    _check(not is_kept, file, "it is there already; choose another name, or add --overwrite", flag)


def check_folder(folder: Path, flag: str = "") -> None:
    """Raise `ConfigError` unless `folder` is writable or can be created."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    _check(
        existing.is_dir() and os.access(existing, os.W_OK),
        folder,
        "is no folder that can be written to",
        flag,
    )


def write_text(file: Path, text: str) -> None:
    """Write the file, replacing an existing one; an `OSError` names the file, also for a full disk."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def unwritable(error: BaseException) -> str | None:
    """The message for an error of the user's disk; None for any other error.

    Libraries wrap what the system says: PyTorch loses it, safetensors keeps its number.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            reason, file = os.strerror(seen.errno), seen.filename
            if seen.errno in _FULL:
                return f"cannot write{f' {str(file)!r}' if file else ''}: {reason}"
            if seen.errno in _REFUSED and file:
                return f"cannot read or write {str(file)!r}: {reason}"
        found = _SAFETENSORS.search(str(seen))
        if found is not None and int(found[1]) in _FULL | _REFUSED:
            return f"cannot write weights: {os.strerror(int(found[1]))}"
        if isinstance(seen, RuntimeError) and _TORCH_SAVE.search(str(seen)):
            return "cannot write weights: the disk is full, or files may not grow so large"
        seen = seen.__cause__
    return None


def _check(fine: bool, path: Path, why: str, flag: str) -> None:
    if not fine:
        raise ConfigError(f"{flag and flag + ': '}cannot write {str(path)!r}: {why}")
