"""The dashboard's figures of Slipstream's own engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI

from slipstream.control.monitor.alarms import Alarm, AlarmKind
from slipstream.core.version import __version__
from slipstream.errors import EngineStoppedError
from slipstream.serve.dashboard.alarm_json import alarm_json, drift_json, speculation_json, task_json
from slipstream.serve.dashboard.page import add_page
from slipstream.serve.dashboard.page_data import PageData
from slipstream.serve.service import Service

READ_TIMEOUT_S = 1.0
"""How long the page waits for a step to end; after that it shows the data of the last read."""
_COUNTED = ("num_passes", "num_tokens", "num_drafted", "num_accepted", "num_reached")
"""The counters of a task in the history, in its order."""


def add_routes(app: FastAPI, service: Service) -> None:
    """The page on the service's engine."""
    add_page(app, EngineSource(service), service.config.body_timeout_s)


class EngineSource:
    """The figures of a service's engine, and the tasks, alarms and answers of the account that requests them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = time.time()

    async def data(self, account: str) -> PageData:
        service = self._service
        with suppress(EngineStoppedError, TimeoutError):  # then the data of the last read are shown
            async with asyncio.timeout(READ_TIMEOUT_S):
                await service.observer.read()
        return self._data(account)

    def acknowledge(self, kind: str, task: str | None, drafter: str | None, account: str) -> bool:
        observer = self._service.observer
        if task is not None:
            task = observer.accounts.name(account, task)
        return kind in list(AlarmKind) and observer.alarms.acknowledge(AlarmKind(kind), task, drafter)

    def _data(self, account: str) -> PageData:
        service, observer, accounts = self._service, self._service.observer, self._service.observer.accounts

        def is_shown(alarm: Alarm) -> bool:
            return alarm.task is None or accounts.split(alarm.task)[0] == account

        def shown(alarm: Alarm) -> dict[str, Any]:
            return alarm_json(alarm, None if alarm.task is None else accounts.task(alarm.task))

        history, report = observer.snapshot.as_json(), observer.report
        replicas = service.replicas()
        tasks = self._tasks(account, history.pop("tasks"))
        return PageData(
            version=__version__,
            uptime_s=time.time() - self._started,
            model=service.model_name,
            method=service.method,
            age_s=observer.age_s,
            is_ready=service.is_ready,
            has_stopped=service.engine.has_stopped,
            max_num_seqs=service.info.max_num_seqs if replicas is None else None,
            max_waiting=service.config.max_waiting,
            num_under_way=service.admission.num_answers,
            latency=observer.latency.as_json(),
            tasks=tasks,
            speculation=speculation_json(report, tasks) if report is not None else None,
            learning=service.learning.as_json() if service.learning is not None else None,
            replicas=replicas,
            methods=[asdict(method) for method in report.methods] if report else [],
            alarms=[shown(alarm) for alarm in observer.alarms.raised if is_shown(alarm)],
            cleared=[
                {**shown(alarm), "cleared": cleared, "why": why}
                for alarm, cleared, why in observer.cleared
                if is_shown(alarm)
            ],
            with_texts=observer.recent.with_texts,
            recent=observer.recent.as_json(account),
            **history,
        )

    def _tasks(self, account: str, counted: dict[str, list[int]]) -> list[dict[str, Any]]:
        """The counters of an account's tasks, with the controller's report and the state of the drift test."""
        observer, accounts = self._service.observer, self._service.observer.accounts
        reports = {
            accounts.label(task.task): task for task in (observer.report.tasks if observer.report else ())
        }
        shown = [(accounts.split(name), name, sums) for name, sums in counted.items()]
        return [
            {
                "task": task,
                **dict(zip(_COUNTED, sums, strict=True)),
                "drift": drift_json(
                    observer.alarms.acceptance(accounts.name(owner, "" if task == "none" else task))
                ),
                **task_json(reports.get(name)),
            }
            for (owner, task), name, sums in shown
            if owner == account
        ]
