"""What becomes of an alarm: a line in the log, a metric, and the list of those that are over."""

from __future__ import annotations

import logging
import time
from collections import deque

from slipstream.control.monitor.alarms import Alarm
from slipstream.serve.metrics.alarm_metrics import AlarmMetrics

logger = logging.getLogger("slipstream.tools.handoff.alarms")


class AlarmLog:
    """Tells of alarms as they are raised and cleared."""

    def __init__(self, metrics: AlarmMetrics) -> None:
        self._metrics = metrics
        self.cleared: deque[tuple[Alarm, float, str]] = deque(maxlen=20)
        """Cleared alarms, the latest first: alarm, time and reason."""

    def on_raise(self, alarm: Alarm) -> None:
        self._metrics.on_alarm(alarm, raised=True)
        logger.warning("alarm raised: %s", alarm.message, extra={"fields": _fields(alarm)})

    def on_clear(self, alarm: Alarm, why: str) -> None:
        self._metrics.on_alarm(alarm, raised=False)
        self.cleared.appendleft((alarm, time.time(), why))
        logger.warning("alarm cleared: %s", why, extra={"fields": _fields(alarm)})


def _fields(alarm: Alarm) -> dict[str, object]:
    return {"kind": alarm.kind, "since": alarm.since, "value": alarm.value}
