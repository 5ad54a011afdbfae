"""Progress of an audit on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class AuditMeter:
    """Counts answers, side by side."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._line_s = time.perf_counter()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("audit"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
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
        """Count answers; `note` says of what."""
        self._done += num
        now_s = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, advance=num, note=note)
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            print(f"audit: {self._done:,} of {self._total:,} answers, {note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def audit_meter(total: int) -> Iterator[AuditMeter]:
    """A meter that is removed at the end."""
    shown = AuditMeter(total)
    try:
        yield shown
    finally:
        shown.close()
