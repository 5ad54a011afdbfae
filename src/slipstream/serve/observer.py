"""Observes the engine: passes on steps, requests and the controller's reports to metrics, history and alarms."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from slipstream.control.monitor.alarms import (
    LEARN_KINDS,
    TASK_KINDS,
    Alarm,
    AlarmKind,
    Alarms,
    FinishedRequest,
)
from slipstream.control.monitor.causes import Traits
from slipstream.control.types import ControlReport
from slipstream.core.metrics.decoded import DecodedRow, DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import FinishReason
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.errors import EngineStoppedError
from slipstream.serve.accounts import Accounts
from slipstream.serve.dashboard.history import History, Snapshot
from slipstream.serve.dashboard.latency import LatencyWindow
from slipstream.serve.dashboard.recent import Pieces, Recent
from slipstream.serve.engines import ServedEngine
from slipstream.serve.job import Job
from slipstream.serve.learning import Learning
from slipstream.serve.metrics.control_metrics import ControlMetrics
from slipstream.serve.metrics.metrics import Metrics

logger = logging.getLogger("slipstream.serve.alarms")

READ_EVERY_S = 2.0
"""Interval at which the engine's state is read, whether or not a client requests it."""


class EngineObserver:
    """Metrics, history, recent answers and alarms of one engine.

    Counting happens where the engine reports its steps; the rest belongs to the event loop.
    """

    def __init__(
        self,
        engine: ServedEngine,
        metrics: Metrics,
        accounts: Accounts,
        with_texts: bool,
        learning: Learning | None = None,
    ) -> None:
        """`accounts` gives the names of tasks for all but `metrics`, which have labels of their own."""
        self._engine = engine
        self._learning = learning
        self._method = engine.info.method
        self._max_model_len = engine.info.max_model_len
        self.metrics = metrics
        self.accounts = accounts
        self.history = History(accounts.label)
        self.snapshot = self.history.snapshot()
        """When the engine was last read."""
        self._read_s = time.monotonic()
        self.latency = LatencyWindow()
        self.recent = Recent(with_texts)
        self.alarms = Alarms(self._on_raise, self._on_clear, task_name=accounts.task)
        self.cleared: deque[tuple[Alarm, float, str]] = deque(maxlen=20)
        """Cleared alarms, the latest first: alarm, time and reason."""
        self._control = ControlMetrics(self.history, lambda name: metrics.task_label(accounts.task(name)))
        metrics.register(self._control)
        if learning is not None:
            metrics.register(learning)
            for kind in LEARN_KINDS:
                metrics.alarms.expect(kind, None, None)
        engine.report_to(self, accounts)

    @property
    def report(self) -> ControlReport | None:
        """The controller's last report; None before the first."""
        return self._control.report

    @property
    def age_s(self) -> float:
        """Time since the engine was last read: long only where a step takes long or the engine has stopped."""
        return time.monotonic() - self._read_s

    async def run(self) -> None:
        """Read the engine every few seconds, until it stops."""
        while not self._engine.has_stopped:
            try:
                await self.read()
            except EngineStoppedError:  # for good, or another process is being started
                pass
            except Exception:
                logger.exception("the engine could not be read")
            await asyncio.sleep(READ_EVERY_S)

    async def read(self) -> None:
        """Bring gauges, alarms and the snapshot up to date. Raises `EngineStoppedError`."""
        stats, report, self.snapshot = await self._engine.read(self._read)
        self._read_s = time.monotonic()
        self.metrics.set_restarts(self._engine.num_restarts)
        self.latency.add(self.metrics.answers.latencies())
        self._control.report = report
        self._control.batches = self.snapshot.batches()
        for method in report.methods:
            self.metrics.alarms.expect(AlarmKind.DRAFTER_FAILED, None, method.name)
        self.alarms.on_report(report)
        if stats.passes:
            self.metrics.alarms.expect(AlarmKind.EAGER_PASSES, None, None)
            self.alarms.on_passes(stats.passes)
        if self._learning is not None:
            self._learning.raise_alarms(self.alarms)

    def follow(self, job: Job) -> Follower:
        """A follower of one job's updates."""
        return Follower(self, job)

    def on_request(self, job: Job, output: RequestOutput, num_streamed: int, pieces: Pieces) -> None:
        """Record that a prompt's last answer has ended."""
        self.recent.add(self.accounts.account(job.options), job, output, pieces.by_answer)
        for kind in TASK_KINDS:
            self.metrics.alarms.expect(kind, job.options.task, None)
        self.alarms.on_request(self._info(job, output, num_streamed))

    def _info(self, job: Job, output: RequestOutput, num_streamed: int) -> FinishedRequest:
        metrics = output.metrics
        num = len(output.outputs)
        truncated = [answer for answer in output.outputs if answer.finish_reason == FinishReason.LENGTH]
        full = [
            answer
            for answer in truncated
            if len(output.prompt_token_ids) + len(answer.token_ids) >= self._max_model_len
        ]
        return FinishedRequest(
            task=self.accounts.name_of(job.options),
            traits=Traits(
                num_prompt_tokens=len(output.prompt_token_ids),
                num_output_tokens=metrics.num_output_tokens // num,
                temperature=job.params.temperature,
                structured=job.params.structured is not None,
                method=self._method_of(self.accounts.name_of(job.options)),
            ),
            num_reached=sum(metrics.reached_per_position),
            num_accepted=sum(metrics.accepted_per_position),
            num_reached_first=sum(metrics.reached_per_position[:1]),
            num_accepted_first=sum(metrics.accepted_per_position[:1]),
            num_streamed=num_streamed,
            num_counted=sum(_counted(answer.metrics) for answer in output.outputs),
            share_truncated=len(truncated) / num,
            share_out_of_context=len(full) / num,
        )

    def _method_of(self, name: str) -> str:
        for task in self.report.tasks if self.report else ():
            if task.task == name:
                return task.method or "off"
        return self._method

    # --- where the engine reports its steps: in its thread, or in the event loop ---------------------------------

    def on_step(self, step: StepReport | None, rows: Seq[DecodedRow]) -> None:
        """As in `StepListener`."""
        if rows:
            self.metrics.steps.on_rows(rows)
            self.history.on_rows(rows)
        if step is not None:
            self.metrics.steps.on_step(step)
            self.history.on_step(step)

    def on_steps(self, decoded: DecodedSteps) -> None:
        """As in `StepListener`."""
        self.metrics.steps.on_repeated_rows(decoded.rows)
        self.metrics.steps.on_prompts(decoded.num_prompt_tokens, decoded.num_cached_tokens)
        for step in decoded.steps:
            self.metrics.steps.on_step(step.report)
        self.history.on_steps(decoded)

    def _read(self, stats: EngineStats, report: ControlReport) -> tuple[EngineStats, ControlReport, Snapshot]:
        self.metrics.on_stats(stats)
        self.history.sample(stats)
        return stats, report, self.history.snapshot()

    # --- alarms -------------------------------------------------------------------------------------------------

    def _on_raise(self, alarm: Alarm) -> None:
        self.metrics.alarms.on_alarm(self._named(alarm), raised=True)
        logger.warning("alarm raised: %s", alarm.message, extra={"fields": self._alarm_fields(alarm)})

    def _on_clear(self, alarm: Alarm, why: str) -> None:
        self.metrics.alarms.on_alarm(self._named(alarm), raised=False)
        self.cleared.appendleft((alarm, time.time(), why))
        logger.warning("alarm cleared: %s", why, extra={"fields": self._alarm_fields(alarm)})

    def _named(self, alarm: Alarm) -> Alarm:
        """The alarm with the task as its client named it."""
        return alarm if alarm.task is None else replace(alarm, task=self.accounts.task(alarm.task))

    def _alarm_fields(self, alarm: Alarm) -> dict[str, Any]:
        account = "" if alarm.task is None else self.accounts.split(alarm.task)[0]
        named = self._named(alarm)
        return {
            "kind": named.kind,
            "task": named.task,
            "drafter": named.method,
            "since": named.since,
            "value": named.value,
            **({"account": account} if account else {}),
        }


class Follower:
    """Follows one job's updates."""

    def __init__(self, observer: EngineObserver, job: Job) -> None:
        self._observer = observer
        self._job = job
        self._num_streamed = [0] * len(job.prompts)
        self._pieces = [Pieces() for _ in job.prompts]

    def add(self, prompt: int, update: Update) -> None:
        """Record an update of the `prompt`-th prompt."""
        self._num_streamed[prompt] += len(update.token_ids)
        if self._observer.recent.with_texts:
            self._pieces[prompt].add(update)
        if update.output is not None:
            self._observer.on_request(
                self._job, update.output, self._num_streamed[prompt], self._pieces[prompt]
            )


def _counted(metrics: RequestMetrics) -> int:
    """Output tokens by the step counters: one for each step that was not cut, and the accepted draft tokens."""
    made = metrics.num_steps + metrics.num_accepted_tokens - metrics.num_cut_steps
    return made + metrics.num_resumed_tokens
