"""How far a run is: answers done, tokens a second so far, time left. On a terminal only, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Meter:
    """Drawn between the timed runs only: a bar that refreshes by itself would slow them down."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._num_tokens = 0
        self._started_s = time.perf_counter()

    def advance(self, num_answers: int, num_tokens: int, note: str) -> None:
        """Count what was answered; `note` says what runs."""
        self._num_tokens += num_tokens
        speed = self._num_tokens / (time.perf_counter() - self._started_s)
        self._progress.update(
            self._task, advance=num_answers, note=note, speed=f"{speed:.0f} tokens/s", refresh=True
        )


@contextmanager
def meter(total: int, auto_refresh: bool = False) -> Iterator[Meter]:
    """A bar over `total` answers; it vanishes at the end. `auto_refresh` where what is timed runs elsewhere."""
    progress = Progress(
        TextColumn("benchmark"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        auto_refresh=auto_refresh,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        yield Meter(progress, progress.add_task("", total=total, speed="", note=""))
