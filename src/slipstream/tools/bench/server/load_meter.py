"""Progress of a load on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from slipstream.rpc.client import Exchange


class LoadMeter:
    """Progress of a load on standard error: a bar on a terminal, otherwise a line every 10 seconds."""

    EVERY_S = 0.25
    """Interval at which to call `show`."""
    _LINE_EVERY_S = 10.0

    def __init__(self, num_requests: int | None, duration_s: float | None) -> None:
        self._num_requests = num_requests
        self._duration_s = duration_s
        self._started_s = self._line_s = time.perf_counter()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("load"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("", total=1.0, note="")
            self._bar.start()

    def show(self, exchanges: Seq[Exchange], num_sent: int) -> None:
        """Draw the finished exchanges and the number sent."""
        now_s = time.perf_counter()
        if self._bar is not None:
            share = self._share(now_s - self._started_s, num_sent)
            note = self._note(exchanges, num_sent, now_s)
            self._bar.update(self._task, completed=share, note=note, refresh=True)
        elif now_s - self._line_s >= self._LINE_EVERY_S:
            self._line_s = now_s
            print(self._note(exchanges, num_sent, now_s), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _share(self, elapsed_s: float, num_sent: int) -> float:
        """Share done of the nearer bound, time or number."""
        in_time = elapsed_s / self._duration_s if self._duration_s else 0.0
        return min(1.0, max(in_time, num_sent / self._num_requests if self._num_requests else 0.0))

    def _note(self, exchanges: Seq[Exchange], num_sent: int, now_s: float) -> str:
        elapsed_s = now_s - self._started_s
        num_failed = sum(exchange.error is not None for exchange in exchanges)
        tokens = sum(exchange.num_output_tokens or 0 for exchange in exchanges)
        firsts = [e.time_to_first_token_s for e in exchanges[-100:] if e.time_to_first_token_s is not None]
        parts = [
            f"{elapsed_s:.0f} s",
            f"{len(exchanges):,} answered",
            f"{num_sent - len(exchanges)} running",
            f"{tokens / elapsed_s if elapsed_s else 0:.0f} tokens/s",
        ]
        if firsts:
            parts.append(f"first token {1e3 * sorted(firsts)[len(firsts) // 2]:.0f} ms")
        if num_failed:
            parts.append(f"{num_failed:,} failed")
        return ", ".join(parts)
