"""Watches which share of an engine's passes ran outside a recorded graph."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.core.metrics.passes import LEAST_PASSES, PassCounts


class PassWatch:
    """Judges stretches of at least `LEAST_PASSES` passes, of target and draft models together.

    What ran before the first call, while models were loaded and tried out, does not count.
    """

    def __init__(self) -> None:
        self._before: PassCounts | None = None
        self.message: str | None = None
        """What the last stretch was judged to be; None where all was well, or none was judged yet."""
        self.share = 0.0
        """Share of passes outside a graph in the last stretch."""

    def add(self, passes: Mapping[str, PassCounts]) -> None:
        """Take what was counted so far; an engine that was started again counts from zero."""
        now = PassCounts.joined(passes.values())
        if self._before is None or now.num_passes < self._before.num_passes:
            self._before = now
            return
        new = now.since(self._before)
        if new.num_passes >= LEAST_PASSES:
            self.message, self.share, self._before = new.complaint, new.share_eager, now

    def forgive(self) -> None:
        """Say nothing until the next stretch is judged."""
        self.message = None
