"""How far a long piece of work is, on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class Meter:
    """Shows shares of a piece of work, or counts its answers."""

    def __init__(self, what: str, total: int | None, refreshes: bool) -> None:
        self._what = what
        self._total = total or 0
        self._done = 0
        self._line_s = time.perf_counter()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(what, markup=False),
                BarColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn() if total is None else TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=refreshes,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, note="")
            self._bar.start()

    def expect(self, more: int) -> None:
        """Add to the answers that are to come."""
        self._total += more

    def advance(self, note: str, num: int = 1) -> None:
        """Count `num` answers; `note` says of what."""
        self._done += num
        counted = f"{self._done:,} of {self._total:,}"
        self.show(self._done, self._total, f"{counted}, {note}", f"{self._what}: {counted} answers, {note}")

    def show(self, done: float, total: float | None, note: str = "", line: str = "") -> None:
        """Draw that `done` of `total` is done, None where that is not known; without a bar say the `line`."""
        now_s = time.perf_counter()
        if self._bar is not None:
            refresh = not self._bar.live.auto_refresh
            self._bar.update(self._task, completed=done, total=total, note=note, refresh=refresh)
        elif line and now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            self.say(line)

    def say(self, line: str) -> None:
        """One line now, where there is no bar."""
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def say(what: str) -> None:
    """One line, before a part that has no count of its own."""
    print(f"{what} …", file=sys.stderr, flush=True)


@contextmanager
def meter(what: str, total: int | None = None, *, refreshes: bool = True) -> Iterator[Meter]:
    """A meter of `total` answers, or of shares, which is removed at the end.

    `refreshes` False draws it only when it is called, so that the drawing does not slow down what is timed in
    this process.
    """
    shown = Meter(what, total, refreshes)
    try:
        yield shown
    finally:
        shown.close()
