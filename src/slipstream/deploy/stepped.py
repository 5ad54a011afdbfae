"""The steps of a replica: counted where they are made, and sent to the fronts with its reports."""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import asdict
from typing import Any

from slipstream.core.metrics.decoded import CountedStep, DecodedRow, DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.passes import PassCounts
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import RequestOptions, tenant_account
from slipstream.core.step import StepItem
from slipstream.deploy.counts import NOTHING, ReplicaCounts
from slipstream.deploy.fleet import ReplicaReport
from slipstream.deploy.guard import FaultGuard
from slipstream.engine.engine import Engine
from slipstream.serve.engine_info import decoded_rows

MAX_STEPS = 10_000
"""Steps between two reports that fronts hear of one by one: more pass only where the event loop is blocked. Their
counts are in the report all the same."""
MAX_ROWS = 10_000
"""Likewise rows that differ: tasks have names of their clients' making."""


class StepCounter:
    """Counts an engine's steps; belongs to its thread."""

    def __init__(self) -> None:
        self._engine = uuid.uuid4().hex
        self._counts: dict[str, Any] = asdict(NOTHING)
        self._reported = NOTHING
        self._rows: list[DecodedRow] = []
        self._steps: deque[CountedStep] = deque(maxlen=MAX_STEPS)
        self._row_counts: dict[DecodedRow, int] = {}
        self._prompts = [0, 0]
        """Tokens of prompts since the last report, and those of them that were cached."""
        self._guard = FaultGuard("counting a step")
        self.by_account = True
        """Whether rows are kept apart by account, the tenant up to its first slash; else they are of no group."""
        self._before: dict[str, int] = {}
        """What the engine itself had counted before this began to count."""
        self._since_s = time.monotonic()

    def attach(self, engine: Engine) -> None:
        """Count from now on, in addition to other listeners; called between two steps."""
        self._before = _own_counts(engine.stats())
        on_observe, on_step = engine.on_observe, engine.on_step

        def observe(items: list[StepItem]) -> None:
            with self._guard:
                self._rows = decoded_rows(items, self._group)
            if on_observe is not None:
                on_observe(items)

        def step(report: StepReport) -> None:
            rows, self._rows = self._rows, []
            with self._guard:
                self._count(report, rows)
            if on_step is not None:
                on_step(report)

        engine.on_observe, engine.on_step = observe, step

    def report(self, engine: Engine) -> tuple[ReplicaReport, DecodedSteps]:
        """How the engine is, what happened since the last report, and its steps since then."""
        stats, now_s = engine.stats(), time.monotonic()
        for name, number in _own_counts(stats).items():
            self._counts[name] = number - self._before.get(name, 0)
        counts = ReplicaCounts(**self._counts)
        new, elapsed_s = counts.since(self._reported), max(now_s - self._since_s, 1e-9)
        report = ReplicaReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            cache_usage=stats.cache_usage,
            num_retained_slots=stats.num_retained_slots,
            num_drafted_sequences=stats.num_drafted_sequences,
            retired_drafters=stats.retired_drafters,
            tokens_per_s=new.num_output_tokens / elapsed_s,
            acceptance_length=new.num_output_tokens / new.num_passes if new.num_passes else 0.0,
            engine=self._engine,
            counts=counts,
        )
        steps = DecodedSteps(list(self._steps), list(self._row_counts.items()), *self._prompts)
        self._steps.clear()
        self._row_counts, self._prompts = {}, [0, 0]
        self._reported, self._since_s = counts, now_s
        return report, steps

    def _group(self, options: RequestOptions) -> str:
        """What a front makes names of: never a whole tenant, of which there is one for every user."""
        return tenant_account(options.tenant) if self.by_account else ""

    def _count(self, report: StepReport, rows: list[DecodedRow]) -> None:
        counts = self._counts
        counts["num_steps"] += 1
        counts["draft_s"] += report.draft_s
        counts["verify_s"] += report.verify_s
        counts["num_passes"] += len(rows)
        depths = 0
        for row in rows:
            counts["num_output_tokens"] += row.num_emitted
            counts["num_prompt_tokens"] += row.num_prompt_tokens
            counts["num_cached_tokens"] += row.num_cached_tokens
            counts["num_drafts"] += row.num_drafted > 0
            counts["num_draft_tokens"] += row.num_drafted
            counts["num_accepted_tokens"] += row.num_accepted
            depths += row.draft_depth if row.num_drafted else 0
            self._tell(row)
        self._steps.append(CountedStep(report, len(rows), depths))

    def _tell(self, row: DecodedRow) -> None:
        if row.num_prompt_tokens:
            self._prompts[0] += row.num_prompt_tokens
            self._prompts[1] += row.num_cached_tokens
            row = row._replace(num_prompt_tokens=0, num_cached_tokens=0)
        counts = self._row_counts
        if row in counts:
            counts[row] += 1
        elif len(counts) < MAX_ROWS:
            counts[row] = 1


def _own_counts(stats: EngineStats) -> dict[str, int]:
    """Fields of `ReplicaCounts` that the engine counts by itself."""
    passes = PassCounts.joined(stats.passes.values())
    return {
        "num_preemptions": stats.num_preemptions,
        "num_draft_failures": stats.num_draft_failures,
        "num_replayed_passes": passes.num_replayed,
        "num_eager_passes": passes.num_eager,
    }
