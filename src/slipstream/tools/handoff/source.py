"""The dashboard's figures of a watched server, and its controller's report as far as its metrics have one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.control.monitor.alarms import Alarm, AlarmKind
from slipstream.control.types import ControlReport, MethodReport, TaskReport
from slipstream.core.version import __version__
from slipstream.serve.dashboard.alarm_json import alarm_json, drift_json, speculation_json, task_json
from slipstream.serve.dashboard.page_data import PageData
from slipstream.tools.handoff.pairs import PairLog
from slipstream.tools.handoff.reading import EngineCounts
from slipstream.tools.handoff.watch import TASK, Watch

_NOTES = (
    "Figures are vLLM's own, read from its metrics: τ is 1 + accepted tokens over drafts, and acceptance by position "
    "takes every draft to have its full depth. They know no tasks, no single answers and no times of drafting.",
)


@dataclass(frozen=True)
class VllmSource:
    """What the page shows of a watch."""

    watch: Watch
    pairs: PairLog | None
    """None where there is no off side."""
    off_side: str
    """What the off side is, in words; '' without one."""
    started: float

    async def data(self, account: str) -> PageData:
        watch, history, total = self.watch, self.watch.history, self.watch.history.total()
        last, report = history.last, self.report(total)
        tasks = self._tasks(total, report)
        speculation = {**speculation_json(report, tasks), "probes": True}  # of what the watch itself compares
        state = watch.pause or (watch.fault and f"cannot be read: {watch.fault}")
        return PageData(
            version=__version__,
            model=watch.server.model,
            method=watch.server.method,
            uptime_s=time.time() - self.started,
            age_s=watch.age_s,
            is_ready=state is None,
            has_stopped=False,
            state=state,
            api_url=watch.server.url,
            num_under_way=last.num_running + last.num_waiting if last else 0,
            acceptance_length=total.acceptance_length,
            **history.as_json(),
            tasks=tasks,
            speculation=speculation if self.pairs is not None else None,
            methods=[asdict(method) for method in report.methods],
            alarms=[_shown(alarm) for alarm in watch.alarms.raised],
            cleared=[
                {**_shown(alarm), "cleared": cleared, "why": why} for alarm, cleared, why in watch.log.cleared
            ],
            notes=self._notes(),
        )

    def acknowledge(self, kind: str, task: str | None, drafter: str | None, account: str) -> bool:
        return kind in list(AlarmKind) and self.watch.alarms.acknowledge(AlarmKind(kind), task, drafter)

    def report(self, total: EngineCounts | None = None) -> ControlReport:
        """What a controller of ours would report; vLLM chooses nothing, so nothing is estimated."""
        total = self.watch.history.total() if total is None else total
        realised = None if self.pairs is None else self.pairs.speedup()
        method = self.watch.server.method
        drafts = total.num_drafts
        depth = total.num_draft_tokens / drafts if drafts else 0.0
        task = TaskReport(
            task=TASK,
            method=method if drafts else None,
            depth=depth,
            acceptance_rate=total.acceptance_rate,
            acceptance_length=total.acceptance_length,
            break_even=None,
            estimated_speedup=None,
            realised=realised,
        )
        drafter = MethodReport(
            name=method,
            acceptance_rate=total.acceptance_rate,
            survival=tuple(count / drafts for count in total.accepted_at) if drafts else (),
            num_steps=drafts,
            num_failures=0,
            retired=False,
        )
        return ControlReport(
            adaptive=False,
            speculating=drafts > 0,
            stands_back=False,
            estimated_speedup=None,
            realised=realised,
            probe_share=0.0,
            methods=(drafter,) if drafts else (),
            tasks=(task,) if total.num_output_tokens else (),
            depth_by_batch=(),
        )

    def _tasks(self, total: EngineCounts, report: ControlReport) -> list[dict[str, Any]]:
        """The one task: all requests."""
        return [
            {
                "task": task.task,
                "num_passes": total.num_drafts,
                "num_tokens": total.num_output_tokens,
                "num_drafted": total.num_draft_tokens,
                "num_accepted": total.num_accepted_tokens,
                "num_reached": sum(total.reached_at),
                "acceptance_length": task.acceptance_length,
                "drift": drift_json(self.watch.alarms.acceptance(TASK)),
                **task_json(task),
            }
            for task in report.tasks
        ]

    def _notes(self) -> list[str]:
        if self.pairs is None:
            return [*_NOTES, "There is no off side, so the realised speedup is not measured."]
        dropped = self.pairs.num_dropped
        more = (
            f" {dropped} pairs were dropped, the last one because {self.pairs.last_drop}." if dropped else ""
        )
        return [*_NOTES, f"Paired probes have {self.off_side} as their off side.{more}"]


def _shown(alarm: Alarm) -> dict[str, Any]:
    return alarm_json(alarm, alarm.task)
