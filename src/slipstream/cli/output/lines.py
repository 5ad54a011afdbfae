"""Reads typed lines, with editing and a history on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from slipstream.cli.output.console import stderr
from slipstream.config import cache_folder

SIGN = "> "
MAX_LINES = 1000
"""The most lines of the history."""
MAX_LINE_BYTES = 16 * 2**10
"""Longer lines are not stored."""


def typed_lines(with_history: bool) -> Iterator[str]:
    """Messages from standard input, stripped.

    On a terminal a line can be edited, and the arrow keys recall earlier ones; `with_history` stores them for later
    conversations. A note reports when they cannot be stored.
    """
    readline = _readline()
    history = LineHistory.opened(readline) if readline is not None and with_history else None
    while True:
        line = _edited() if readline is not None else _plain()
        if line is None:
            return
        if history is not None:
            history.add(line)
        yield line.strip()


class LineHistory:
    """The last typed lines, in a file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def default_path() -> Path:
        """The history's file in the cache folder."""
        return cache_folder() / "chat_history"

    @classmethod
    def opened(cls, readline: ModuleType) -> LineHistory | None:
        """The history, its lines loaded into `readline`; None where the file cannot be used."""
        history = cls(cls.default_path())
        try:
            lines = history.read()
        except OSError as error:
            stderr().print(f"the history is not stored: {history.path}: {error.strerror}", markup=False)
            return None
        for line in lines:
            readline.add_history(line)
        return history

    def read(self) -> list[str]:
        """The lines, oldest first; cuts the file to the last `MAX_LINES`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(self._open(os.O_RDWR), "r+", encoding="utf-8", errors="replace", newline="\n") as file:
            os.fchmod(file.fileno(), 0o600)  # also for an existing file
            lines = file.read().split("\n")[:-1]
            kept = [line for line in lines if 0 < len(line.encode()) <= MAX_LINE_BYTES][-MAX_LINES:]
            if kept != lines:
                file.seek(0)
                file.writelines(f"{line}\n" for line in kept)
                file.truncate()
        return kept

    def add(self, line: str) -> None:
        """Store a line; errors are ignored, so that they do not end the conversation."""
        text = " ".join(line.split())  # pasted text may have line breaks
        raw = text.encode(errors="replace")
        if raw and len(raw) <= MAX_LINE_BYTES:
            with contextlib.suppress(OSError), os.fdopen(self._open(os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.write(raw + b"\n")

    def _open(self, flags: int) -> int:
        return os.open(self.path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _readline() -> ModuleType | None:
    """The `readline` module, if input and output are a terminal and Python has it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        import readline
    except ImportError:
        return None
    return readline


def _edited() -> str | None:
    """A line edited with `readline`; None at the end of the input."""
    try:
        return input(SIGN)
    except EOFError:
        print()
        return None


def _plain() -> str | None:
    """An unedited line, with a prompt sign on a terminal; None at the end of the input."""
    if sys.stdin.isatty():
        print(SIGN, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline() or None
