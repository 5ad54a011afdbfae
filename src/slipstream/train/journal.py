"""An append-only file of JSON lines that survives a killed run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import ConfigError, RequestError
from slipstream.text.jsonl import read_rows


class Journal:
    """Rows that were written are there after a kill; a last line that was not finished is cut off.

    Raises `ConfigError` when the file cannot be written, and `RequestError` when it holds something else.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("ab")
            _lock(self._stream, file)
            self._size = _cut_unfinished(file)
            self.rows = [row for _, row in read_rows(file)] if self._size else []
            """The rows in the file when it was opened."""
        except OSError as error:
            raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and hand it to the system; when that fails, the file holds the rows before and no more."""
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            self._abandon()
            raise ConfigError(
                f"cannot write {str(self.file)!r}: {error.strerror}; what it holds is whole, and the same command "
                "continues from there"
            ) from None
        self._size += len(line)

    def close(self) -> None:
        """Close the file; no row may be appended after."""
        self._stream.close()

    def _abandon(self) -> None:
        """Close without another attempt to write, and cut off a partly written row."""
        raw = self._stream.detach()
        raw.truncate(self._size)
        raw.close()


def _lock(stream: BinaryIO, file: Path) -> None:
    """Lock the file against a second run until `stream` is closed."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ConfigError(
            f"another run is writing {str(file)!r}; wait for it, or choose another --output"
        ) from None


def _cut_unfinished(file: Path) -> int:
    """Cut the file after its last complete line; returns its size in bytes."""
    with file.open("rb+") as stream:
        size = stream.seek(0, 2)
        block, end = 1 << 16, size
        while end:
            start = max(end - block, 0)
            stream.seek(start)
            at = stream.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        stream.truncate(end)
        return end


def check_complete(journal: Journal, keys: set[str], what: str) -> None:
    """Raise `RequestError` unless every row of the journal has `keys`: guards against a wrong file name."""
    for row in journal.rows:
        if not keys <= row.keys():
            raise RequestError(f"{journal.file} is not a file of {what}; choose another --output")
