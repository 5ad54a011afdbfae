"""How long answers are kept: those that are older are deleted from the ring, at most an hour late."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from slipstream.errors import LearnError
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import remove_older

logger = logging.getLogger(__name__)

HOUR_S = 3600.0
_LOOKS = 24
"""Within the age itself."""
RETRY_S = 60.0
"""After a deletion that failed."""


class Retention:
    """Deletes what is too old, now and then; used from one thread."""

    def __init__(
        self, folder: LearnFolder, max_age_s: float | None, clock: Callable[[], float] = time.time
    ) -> None:
        """None keeps answers until the ring needs their room."""
        self._folder, self._max_age_s, self._clock = folder, max_age_s, clock
        self._looked_s = 0.0
        self._wait_s = 0.0
        """From then on until it looks again."""
        self.fault = ""
        """Why what is too old is still there; empty while it is not."""

    def look(self) -> int:
        """Delete what is too old, unless it was looked for a while ago; returns how many records. Never raises."""
        now_s, age_s = self._clock(), self._max_age_s
        if age_s is None:
            return 0
        if 0 <= now_s - self._looked_s < self._wait_s:
            return 0
        every_s = min(age_s / _LOOKS, HOUR_S)
        self._looked_s, self._wait_s = now_s, min(RETRY_S, every_s)
        try:
            num_removed = remove_older(self._folder, now_s - age_s, now_s)
        except LearnError as error:
            fault = f"answers that are too old cannot be deleted: {error}"
            if fault != self.fault:  # not each minute
                logger.warning("learning: %s; serving goes on", fault)
            self.fault = fault
            return 0
        self.fault, self._wait_s = "", every_s
        return num_removed


class RetentionThread:
    """Deletes what is too old for a server that learns nothing: the answers of one that did are there still."""

    def __init__(self, folder: LearnFolder, max_age_s: float) -> None:
        self._folder = folder
        self._retention = Retention(folder, max_age_s)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learn-retention", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why what is too old is still there; empty while it is not."""
        return self._retention.fault

    def close(self) -> None:
        """End it."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        if self._folder.versions.is_dir():
            with contextlib.suppress(LearnError):  # what hinders this hinders the deletion, which tells
                self._folder.clear_leftovers()
        self._retention.look()
        while not self._closed.wait(RETRY_S):
            self._retention.look()
