"""Traffic to advise for: prompts by task, a trace of requests with arrival times, or the log of a running server."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.assets.workload.reading import Question, Workload, read_workload
from slipstream.errors import RequestError
from slipstream.text.jsonl import read_rows, read_text

MIN_TRACE = 2
"""Requests of a trace: one alone does not tell how they overlap."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """When one request of a trace came, and of which task it was."""

    arrival_s: float
    """Since the first one."""
    task: str


@dataclass(frozen=True)
class Requests:
    """Prompts by task, and with a trace when they come."""

    workload: Workload
    trace: tuple[TracedRequest, ...] = ()
    """In the order of arrival; the requests' texts are those of `workload`, task by task, again from the first after
    the last."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What a reader should know about where the texts came from."""

    @property
    def shares(self) -> dict[str, float]:
        """Each task's share of the traced requests whose task has prompts; empty without a trace."""
        known = {question.task for question in self.workload.questions}
        tasks = [one.task for one in self.trace if one.task in known]
        return {task: number / len(tasks) for task, number in Counter(tasks).items()}


def read_traffic(workload: str | None, trace: Path | None, log: Path | None) -> Requests:
    """The traffic that the flags name; the package's sample without any. Raises `RequestError`."""
    if trace is not None and log is not None:
        raise RequestError("--trace and --log both say when requests come; give one of them")
    if trace is not None:
        if workload is not None:
            raise RequestError("a trace has its own prompts; omit --workload, or give the server's --log")
        return read_trace(trace)
    if log is not None:
        return read_log(log, workload)
    found = read_workload(workload or "sample")
    if not found.questions:
        raise RequestError(f"{found.source} has no prompts")
    return Requests(found)


def read_trace(file: Path) -> Requests:
    """A trace in JSON lines: `arrival_s` (seconds) and a prompt, as in a workload."""
    found = _questions(file)
    arrivals = {where: _arrival(row, where) for where, row in read_rows(file)}
    found = sorted(found, key=lambda question: arrivals[question.where])
    requests = [TracedRequest(arrivals[question.where], question.task) for question in found]
    return Requests(Workload(str(file), found), _in_order(requests, str(file)))


def _questions(file: Path) -> list[Question]:
    if file.suffix != ".jsonl":
        raise RequestError(
            f"trace {str(file)!r} must be a .jsonl file: an object a line, with arrival_s and a prompt"
        )
    return read_workload(str(file)).questions


def _arrival(row: dict[str, Any], where: str) -> float:
    value = row.get("arrival_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise RequestError(f"{where} needs arrival_s, the seconds at which the request came, got {value!r}")
    return float(value)


def read_log(file: Path, workload: str | None) -> Requests:
    """The requests of a server's JSON log: when they came, and of which tasks.

    Texts are in it only where the server ran with --log-prompts; else they are taken from `workload`, task by task.
    """
    rows = _logged(file)
    asked = [_asked_question(row, f"{file}, request {number}") for number, row in enumerate(rows, start=1)]
    requests = _in_order([_traced(row, str(file)) for row in rows], str(file))
    with_text = [question for question in asked if question is not None]
    if with_text and workload is None:
        return Requests(Workload(str(file), with_text, len(asked) - len(with_text)), requests)
    if workload is None:
        raise RequestError(
            f"{file} has no texts: the server ran without --log-prompts. Give prompts of the same kind with --workload"
        )
    found = read_workload(workload)
    notes = (f"arrivals and tasks are those of {file.name}; texts and lengths are those of {found.source}",)
    return Requests(found, requests, notes)


def _logged(file: Path) -> list[dict[str, Any]]:
    """The log's lines of answered requests; lines of other programs are passed over."""
    rows: list[dict[str, Any]] = []
    for line in read_text(file).split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("message") == "request" and row.get("output_tokens"):
            rows.append(row)
    if not rows:
        raise RequestError(
            f"{file} has no answered requests; give the log of `slipstream serve --log-format json`"
        )
    return rows


def _traced(row: dict[str, Any], source: str) -> TracedRequest:
    try:
        ended_s = datetime.fromisoformat(str(row["time"])).timestamp()
        duration_s = float(row.get("duration_ms", 0.0)) / 1e3
    except (KeyError, ValueError, TypeError, OverflowError):
        duration_s = math.nan
    if not math.isfinite(duration_s) or not isinstance(row["output_tokens"], int):
        raise RequestError(
            f"{source} has a request without time, duration_ms or output_tokens that are of use: "
            f"{json.dumps(row)[:120]}"
        )
    return TracedRequest(ended_s - duration_s, str(row.get("task") or "all"))


def _asked_question(row: dict[str, Any], where: str) -> Question | None:
    asked, task = row.get("asked"), str(row.get("task") or "all")
    if isinstance(asked, str) and asked.strip():
        return Question(task, where, text=asked, output_tokens=row.get("output_tokens"))
    if isinstance(asked, list) and asked and all(isinstance(part, dict) for part in asked):
        return Question(task, where, messages=tuple(asked), output_tokens=row.get("output_tokens"))
    return None


def _in_order(requests: Seq[TracedRequest], source: str) -> tuple[TracedRequest, ...]:
    """By arrival, the first one at 0."""
    if len(requests) < MIN_TRACE:
        raise RequestError(
            f"{source} has {len(requests)} request; a trace needs at least {MIN_TRACE} to tell how requests overlap. "
            "Give single prompts with --workload"
        )
    first = min(request.arrival_s for request in requests)
    moved = [TracedRequest(one.arrival_s - first, one.task) for one in requests]
    return tuple(sorted(moved, key=lambda request: request.arrival_s))
