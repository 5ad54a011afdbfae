"""Progress of a server's start, on standard error."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.status import Status
from rich.text import Text

_LINE_EVERY_S = 10.0
_MAX_SHOWN = 100
"""Characters of the server's own line."""


class StartMeter:
    """How long a start has taken, and the server's latest line: a status on a terminal, else a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._line_s = time.monotonic()
        self._status: Status | None = None
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status(what)
            self._status.start()

    def __call__(self, passed_s: float, line: str) -> None:
        """Tell of the start so far."""
        told = f"{self._what}: {passed_s:.0f} s" + (f", {line[-_MAX_SHOWN:]}" if line else "")
        if self._status is not None:
            self._status.update(Text(told))
        elif time.monotonic() - self._line_s >= _LINE_EVERY_S:
            self._line_s = time.monotonic()
            print(told, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the status."""
        if self._status is not None:
            self._status.stop()
