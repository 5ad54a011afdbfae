"""Alarms, drift tests and the controller's report as the dashboard's page reads them, whatever their source."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from slipstream.control.monitor.alarms import Alarm
from slipstream.control.monitor.drift import REFERENCE_SIZES, ShiftWatch
from slipstream.control.realised import MIN_PAIRS
from slipstream.control.types import ControlReport, TaskReport

MIN_REQUESTS = 30
"""Requests of a task that must have ended before its break-even and its estimated speedup are shown. Requests differ
in acceptance by more than chance among their tokens, so each counts once: the mean of 30 is uncertain by a fifth of
their spread."""


def drift_json(watch: ShiftWatch | None) -> dict[str, Any]:
    """The state of the drift test of a task's conditional α."""
    if watch is None:
        return {"state": "unwatched"}
    if watch.reference is None:
        return {"state": "learning", "num_learned": watch.num_learned, "num_needed": REFERENCE_SIZES[0]}
    state = "drifting" if watch.shift else "steady"
    return {"state": state, "usual": watch.reference.mean, "level": watch.level}


def speculation_json(report: ControlReport, tasks: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Whether speculation pays, for all tasks together.

    `tasks` are the rows that the page shows, with the counters of each. What is estimated of all is the mean of what
    they say, by target passes: the tile and the rows cannot contradict each other.
    """
    known = [task for task in tasks if task.get("estimated_speedup") is not None]
    passes = sum(task["num_passes"] for task in known)
    few = [task["too_few_requests"] for task in tasks if task.get("too_few_requests") is not None]
    return {
        "adaptive": report.adaptive,
        "speculating": report.speculating,
        "stands_back": report.stands_back,
        "estimated_speedup": (
            sum(task["estimated_speedup"] * task["num_passes"] for task in known) / passes if passes else None
        ),
        "too_few_requests": max(few, default=None) if not passes else None,
        "realised": report.realised and asdict(report.realised),
        "num_pairs": report.num_pairs,
        "num_pairs_needed": MIN_PAIRS,
        "probes": report.next_probe_s is not None,
        "next_probe_s": report.next_probe_s,
        "probe_share": report.probe_share,
    }


def task_json(task: TaskReport | None) -> dict[str, Any]:
    """The controller's report on a task; after fewer than `MIN_REQUESTS` requests their number, in place of what is
    estimated."""
    if task is None:
        return {}
    is_estimated = task.estimated_speedup is not None or task.break_even is not None
    too_few = is_estimated and task.num_requests < MIN_REQUESTS
    return {
        "method": task.method or "off",
        "depth": task.depth,
        "break_even": None if too_few else task.break_even,
        "estimated_speedup": None if too_few else task.estimated_speedup,
        "too_few_requests": task.num_requests if too_few else None,
        "realised": task.realised and asdict(task.realised),
        "num_pairs": task.num_pairs,
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
