"""Consoles: answers go to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from slipstream.text.stream import Piece

_DRAFT, _TARGET, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def uses_colour(stream: TextIO) -> bool:
    """True on a terminal, unless `NO_COLOR` is set; `FORCE_COLOR` decides for other streams."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def stderr() -> Console:
    """Standard error, for progress, reports and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def say_fetching(model: object) -> None:
    """Say on standard error that a model is downloaded."""
    stderr().print(f"fetching {model} …", markup=False)


def results() -> Console:
    """Standard output, for reports that are results. Answers are written by `Painter`, character by character."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


def wide_results() -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough for any table without one."""
    width = None if sys.stdout.isatty() else 240
    return Console(highlight=False, emoji=False, width=width)


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and aligned values; lines are not wrapped, so that they can be searched."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}", markup=False)


class Painter:
    """Writes answers to standard output, on a terminal with accepted draft tokens in another colour."""

    def __init__(self) -> None:
        self._colour = uses_colour(sys.stdout)

    def legend(self) -> None:
        """Print the meaning of the colours, if there are colours."""
        if self._colour:
            print(
                f"{_DRAFT}accepted draft tokens{_RESET}  {_TARGET}the target's own tokens{_RESET}", flush=True
            )

    def heading(self, text: str) -> None:
        """Print a line above one of several answers."""
        print(f"\x1b[1m{text}{_RESET}" if self._colour else text, flush=True)

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write text as it is released."""
        for piece in pieces:
            if self._colour:
                sys.stdout.write(f"{_DRAFT if piece.from_draft else _TARGET}{piece.text}{_RESET}")
            else:
                sys.stdout.write(piece.text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the answer's last line."""
        sys.stdout.write("\n")
        sys.stdout.flush()
