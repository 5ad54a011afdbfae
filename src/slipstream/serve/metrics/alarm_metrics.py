"""Alarms as metrics: which are raised now, and how often each was."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.control.monitor.alarms import Alarm, AlarmKind
from slipstream.serve.metrics.instruments import Instruments


class AlarmMetrics:
    """`slipstream_alarm` and `slipstream_alarm_raises_total`, by kind, task and method."""

    def __init__(self, new: Instruments, task_label: Callable[[str], str]) -> None:
        self._task_label = task_label
        on_what = ("kind", "task", "method")
        self._raised = new.gauge("alarm", "Alarms that are raised now.", *on_what)
        self._raises = new.counter("alarm_raises", "Alarms that were raised.", *on_what)

    def on_alarm(self, alarm: Alarm, *, raised: bool) -> None:
        """Count an alarm that was raised or cleared."""
        labels = self._labels(alarm.kind, alarm.task, alarm.method)
        self._raised.labels(*labels).inc(1 if raised else -1)
        if raised:
            self._raises.labels(*labels).inc()

    def expect(self, kind: AlarmKind, task: str | None, method: str | None) -> None:
        """Make the series of a possible alarm exist at 0."""
        self._raises.labels(*self._labels(kind, task, method))

    def _labels(self, kind: AlarmKind, task: str | None, method: str | None) -> tuple[str, str, str]:
        return str(kind), "" if task is None else self._task_label(task), method or ""
