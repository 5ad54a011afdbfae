"""Progress of an advice on standard error: a bar on a terminal, otherwise a line a part."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class AdviceMeter:
    """Drawn between timed steps only, so that it does not slow them down."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._part = ""
        self._started_s = time.perf_counter()

    def __enter__(self) -> AdviceMeter:
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("advise"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=1.0, note="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, part: str, done: int, total: int) -> None:
        """How much of a part is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=max(total, 1), note=part, refresh=True)
        elif part != self._part:
            elapsed_s = time.perf_counter() - self._started_s
            print(f"{elapsed_s:5.0f} s  {part} …", file=sys.stderr, flush=True)
        self._part = part
