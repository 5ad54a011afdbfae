"""How far a long piece of work is, on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class Meter:
    """Counts answers."""

    def __init__(self, what: str, total: int, refreshes: bool) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._line_s = time.perf_counter()
        self._bar: Progress | None = None
        self._refreshes = refreshes
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(what),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
                auto_refresh=refreshes,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, note="")
            self._bar.start()

    def expect(self, more: int) -> None:
        """Add to the answers that are to come."""
        self._total += more
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def advance(self, note: str, num: int = 1) -> None:
        """Count `num` answers; `note` says of what."""
        self._done += num
        now_s = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, advance=num, note=note, refresh=not self._refreshes)
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            line = f"{self._what}: {self._done:,} of {self._total:,} answers, {note}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def say(what: str) -> None:
    """One line, before a part that has no count of its own."""
    print(f"{what} …", file=sys.stderr, flush=True)


@contextmanager
def meter(what: str, total: int, *, refreshes: bool = True) -> Iterator[Meter]:
    """A meter of `total` answers, which is removed at the end.

    `refreshes` False draws it only when it advances, so that the drawing does not slow down what is timed in this
    process.
    """
    shown = Meter(what, total, refreshes)
    try:
        yield shown
    finally:
        shown.close()
