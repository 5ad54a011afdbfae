"""Alarms, drift tests and the controller's report as the dashboard's page reads them, whatever their source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream.control.types import ControlReport, TaskReport
from slipstream.monitor.alarms import Alarm
from slipstream.monitor.drift import REFERENCE_SIZES, ShiftWatch


def drift_json(watch: ShiftWatch | None) -> dict[str, Any]:
    """The state of the drift test of a task's conditional α."""
    if watch is None:
        return {"state": "unwatched"}
    if watch.reference is None:
        return {"state": "learning", "num_learned": watch.num_learned, "num_needed": REFERENCE_SIZES[0]}
    state = "drifting" if watch.shift else "steady"
    return {"state": state, "usual": watch.reference.mean, "level": watch.level}


def speculation_json(report: ControlReport) -> dict[str, Any]:
    """Whether speculation pays, for all tasks together."""
    return {
        "adaptive": report.adaptive,
        "speculating": report.speculating,
        "stands_back": report.stands_back,
        "estimated_speedup": report.estimated_speedup,
        "realised": report.realised and asdict(report.realised),
        "probe_share": report.probe_share,
    }


def task_json(task: TaskReport | None) -> dict[str, Any]:
    """The controller's report on a task."""
    if task is None:
        return {}
    return {
        "method": task.method or "off",
        "depth": task.depth,
        "break_even": task.break_even,
        "estimated_speedup": task.estimated_speedup,
        "realised": task.realised and asdict(task.realised),
    }


def alarm_json(alarm: Alarm, task: str | None) -> dict[str, Any]:
    """A raised alarm; `task` is the name that the reader gave the alarm's task."""
    return {
        "kind": alarm.kind,
        "task": task,
        "drafter": alarm.method,
        "since": alarm.since,
        "message": alarm.message,
        "value": alarm.value,
    }
