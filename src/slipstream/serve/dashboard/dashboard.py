"""`/dashboard`: a page that shows the engine's activity, and the data for it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from slipstream import __version__
from slipstream.control.types import TaskReport
from slipstream.errors import EngineStoppedError
from slipstream.monitor.alarms import Alarm, AlarmKind
from slipstream.monitor.drift import REFERENCE_SIZES, ShiftWatch
from slipstream.serve.accounts import Accounts
from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.schema import Body, parse
from slipstream.serve.auth import account_of
from slipstream.serve.limits import check_json, read_body
from slipstream.serve.service import Service

READ_TIMEOUT_S = 1.0
"""How long the page waits for a step to end; after that it shows the data of the last read."""
_MAX_ACKNOWLEDGE_BYTES = 4096
_COUNTED = ("num_passes", "num_tokens", "num_drafted", "num_accepted", "num_reached")
"""The counters of a task in the history, in its order."""


class AcknowledgeBody(Body):
    """The alarm that is acknowledged."""

    kind: str
    task: str | None = None
    drafter: str | None = None


def add_routes(app: FastAPI, service: Service) -> None:
    """The page itself holds no data and needs no key; its data need one where the server has keys."""
    page, policy = _page()
    started = time.time()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("dashboard")  # relative, since a proxy may serve this below a path of its own

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return Response(
            page,
            media_type="text/html; charset=utf-8",
            headers={
                "Content-Security-Policy": policy,
                "Cache-Control": "no-cache",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            },
        )

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        with suppress(EngineStoppedError, TimeoutError):  # then the data of the last read are shown
            async with asyncio.timeout(READ_TIMEOUT_S):
                await service.observer.read(service.engine)
        data = {"uptime_s": time.time() - started, **_data(service, account_of(request.scope))}
        return JSONResponse(data, headers={"Cache-Control": "no-store"})

    @app.post("/dashboard/acknowledge", include_in_schema=False)
    async def acknowledge(request: Request) -> Response:
        """Clear an alarm: the present level is the reference from now on."""
        check_json(request)
        body = parse(
            AcknowledgeBody, await read_body(request, _MAX_ACKNOWLEDGE_BYTES, service.config.body_timeout_s)
        )
        observer, task = service.observer, body.task
        if task is not None:
            task = observer.accounts.name(account_of(request.scope), task)
        if body.kind not in list(AlarmKind) or not observer.alarms.acknowledge(
            AlarmKind(body.kind), task, body.drafter
        ):
            raise ApiError(404, "there is no such alarm", code="not_found")
        return JSONResponse({"acknowledged": True})


def _page() -> tuple[str, str]:
    """The page, and its Content-Security-Policy: no style or script but its own, no requests but to its own server."""
    page = (
        resources.files("slipstream.serve.dashboard").joinpath("dashboard.html").read_text(encoding="utf-8")
    )
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(service: Service, account: str) -> dict[str, Any]:
    """The data of the page for an account: the engine's figures, and the account's own tasks, alarms and answers."""
    observer, config = service.observer, service.config
    accounts = observer.accounts

    def is_shown(alarm: Alarm) -> bool:
        return alarm.task is None or accounts.split(alarm.task)[0] == account

    history = observer.snapshot.as_json()
    report = observer.report
    speculation = None
    if report is not None:
        speculation = {
            "adaptive": report.adaptive,
            "speculating": report.speculating,
            "stands_back": report.stands_back,
            "estimated_speedup": report.estimated_speedup,
            "realised": report.realised and asdict(report.realised),
            "probe_share": report.probe_share,
        }
    return {
        "version": __version__,
        "model": service.model_name,
        "method": service.method,
        "age_s": observer.age_s,
        "is_ready": service.is_ready,
        "has_stopped": service.engine.has_stopped,
        "max_num_seqs": service.engine.engine.config.max_num_seqs,
        "max_waiting": config.max_waiting,
        "num_under_way": service.admission.num_answers,
        **history,
        "tasks": _tasks(service, account, history["tasks"]),
        "speculation": speculation,
        "methods": [asdict(method) for method in report.methods] if report else [],
        "alarms": [_alarm(alarm, accounts) for alarm in observer.alarms.raised if is_shown(alarm)],
        "cleared": [
            {**_alarm(alarm, accounts), "cleared": cleared, "why": why}
            for alarm, cleared, why in observer.cleared
            if is_shown(alarm)
        ],
        "with_texts": observer.recent.with_texts,
        "recent": observer.recent.as_json(account),
    }


def _tasks(service: Service, account: str, counted: dict[str, list[int]]) -> list[dict[str, Any]]:
    """The counters of an account's tasks, with the controller's report and the state of the drift test."""
    observer, accounts = service.observer, service.observer.accounts
    reports = {accounts.label(task.task): task for task in (observer.report.tasks if observer.report else ())}
    shown = [(accounts.split(name), name, sums) for name, sums in counted.items()]
    return [
        {
            "task": task,
            **dict(zip(_COUNTED, sums, strict=True)),
            "drift": _drift(observer.alarms.acceptance(accounts.name(owner, "" if task == "none" else task))),
            **_task_report(reports.get(name)),
        }
        for (owner, task), name, sums in shown
        if owner == account
    ]


def _drift(watch: ShiftWatch | None) -> dict[str, Any]:
    """The state of the drift test of a task's conditional α."""
    if watch is None:
        return {"state": "unwatched"}
    if watch.reference is None:
        return {"state": "learning", "num_learned": watch.num_learned, "num_needed": REFERENCE_SIZES[0]}
    state = "drifting" if watch.shift else "steady"
    return {"state": state, "usual": watch.reference.mean, "level": watch.level}


def _task_report(task: TaskReport | None) -> dict[str, Any]:
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


def _alarm(alarm: Alarm, accounts: Accounts) -> dict[str, Any]:
    return {
        "kind": alarm.kind,
        "task": None if alarm.task is None else accounts.task(alarm.task),
        "drafter": alarm.method,
        "since": alarm.since,
        "message": alarm.message,
        "value": alarm.value,
    }
