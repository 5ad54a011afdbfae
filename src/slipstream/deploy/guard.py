"""Work that accompanies requests, such as statistics, that must not end them where it fails."""

from __future__ import annotations

import logging
import time
from types import TracebackType

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class FaultGuard:
    """A context whose faults end here: one line in the log, once in `LOG_EVERY_S`, with how many there were."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num = 0
        self._next_s = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._num += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            logger.error(
                "%s failed, %d times so far: %s: %s", self._what, self._num, type(error).__name__, error
            )
            logger.debug("where it failed", exc_info=error)
        return True
