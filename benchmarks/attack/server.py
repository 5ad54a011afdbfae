"""The attacked server: `slipstream serve` in a process of its own, its memory watched, its log kept."""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence as Seq
from pathlib import Path

import psutil

from benchmarks.harness.processes import SLIPSTREAM, Server, family

_LOOK_EVERY_S = 0.1


class AttackedServer(Server):
    """A server that is killed when its memory passes `memory_bytes`."""

    def __init__(
        self, source: Path, arguments: Seq[str], memory_bytes: int, max_descriptors: int | None, log: Path
    ) -> None:
        """`source` is the folder that holds the package to serve with."""
        super().__init__([*SLIPSTREAM, "serve", *arguments], log, {"PYTHONPATH": str(source)})
        if max_descriptors is not None:  # while it still imports
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
        self._memory_bytes = memory_bytes
        self.rss_bytes = 0
        """Resident memory of the server and its children, when last looked at."""
        self.peak_rss_bytes = 0
        self.killed_for_memory = False
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """What it holds while it ends is not looked at any more."""
        self._over.set()
        self._watcher.join()
        return super().stop(timeout_s)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S) and self.is_alive:
            total = 0
            for process in family(self.process.pid):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.rss_bytes = total
            self.peak_rss_bytes = max(self.peak_rss_bytes, total)
            if total > self._memory_bytes:
                self.killed_for_memory = True
                self.process.kill()
