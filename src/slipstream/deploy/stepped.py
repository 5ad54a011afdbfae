"""The steps of a replica: counted where they are made, and sent to the fronts with its reports."""

from __future__ import annotations

import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from slipstream.core import StepItem
from slipstream.deploy.counts import NOTHING, ReplicaCounts
from slipstream.deploy.fleet import ReplicaReport
from slipstream.engine.engine import Engine
from slipstream.metrics.decoded import DecodedRow
from slipstream.metrics.step import StepReport
from slipstream.serve.facts import decoded_rows

Stepped = tuple[StepReport, list[DecodedRow]]
"""A step, and what it made of each answer. A row's `group` is the tenant: the front has its own names."""

MAX_STEPS = 10_000
"""Steps between two reports that fronts hear of one by one: more pass only where the event loop stands still. Their
counts are in the report all the same."""
_values = attrgetter(*(field.name for field in fields(StepReport)))


class StepCounter:
    """Counts an engine's steps; belongs to its thread."""

    def __init__(self) -> None:
        self._engine = uuid.uuid4().hex
        self._counts: dict[str, Any] = asdict(NOTHING)
        self._reported = NOTHING
        self._rows: list[DecodedRow] = []
        self._steps: deque[Stepped] = deque(maxlen=MAX_STEPS)
        self._before = (0, 0)
        """Preemptions and failures of drafters before this began to count."""
        self._since_s = time.monotonic()

    def attach(self, engine: Engine) -> None:
        """Count from now on, beside other listeners; called between two steps."""
        stats = engine.stats()
        self._before = stats.num_preemptions, stats.num_draft_failures
        on_observe, on_step = engine.on_observe, engine.on_step

        def observe(items: list[StepItem]) -> None:
            self._rows = decoded_rows(items, attrgetter("tenant"))
            if on_observe is not None:
                on_observe(items)

        def step(report: StepReport) -> None:
            self._count(report, self._rows)
            self._rows = []
            if on_step is not None:
                on_step(report)

        engine.on_observe, engine.on_step = observe, step

    def report(self, engine: Engine) -> tuple[ReplicaReport, list[Stepped]]:
        """How the engine is, what happened since the last report, and its steps since then."""
        stats, now_s = engine.stats(), time.monotonic()
        self._counts["num_preemptions"] = stats.num_preemptions - self._before[0]
        self._counts["num_draft_failures"] = stats.num_draft_failures - self._before[1]
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
        steps = list(self._steps)
        self._steps.clear()
        self._reported, self._since_s = counts, now_s
        return report, steps

    def _count(self, report: StepReport, rows: list[DecodedRow]) -> None:
        counts = self._counts
        counts["num_steps"] += 1
        counts["draft_s"] += report.draft_s
        counts["verify_s"] += report.verify_s
        counts["num_passes"] += len(rows)
        for row in rows:
            counts["num_output_tokens"] += row.num_emitted
            counts["num_prompt_tokens"] += row.num_prompt_tokens
            counts["num_cached_tokens"] += row.num_cached_tokens
            counts["num_drafts"] += row.num_drafted > 0
            counts["num_draft_tokens"] += row.num_drafted
            counts["num_accepted_tokens"] += row.num_accepted
        self._steps.append((report, rows))


def steps_to_json(steps: Iterable[Stepped]) -> list[Any]:
    """Steps as plain lists, equal rows of a step once with their number: most answers fare alike."""
    return [[_values(report), list(Counter(rows).items())] for report, rows in steps]


def steps_from_json(values: Seq[Any]) -> list[Stepped]:
    """The steps, rows of a step in no order."""
    return [
        (StepReport(*report), [DecodedRow(*row) for row, number in rows for _ in range(number)])
        for report, rows in values
    ]
